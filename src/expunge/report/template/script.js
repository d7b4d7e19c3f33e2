// The page reads without this: it makes the headings of tables sort, and remembers the colours.
"use strict";
for (const heading of document.querySelectorAll("th[data-sort]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => sort(heading));
}
function sort(heading) {
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const place = heading.cellIndex;
  const body = heading.closest("table").querySelector("tbody.sorted");
  const key = (row) => {
    const cell = row.cells[place];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const empty = (value) => value === "" || value === "–";
  const compare = (one, other) => {
    if (empty(one) || empty(other)) return empty(one) - empty(other);
    const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other));
    return down ? -order : order;
  };
  const keyed = Array.from(body.rows, (row) => [key(row), row]);
  keyed.sort((one, other) => compare(one[0], other[0]));
  body.append(...keyed.map((pair) => pair[1]));
}
const themes = document.querySelectorAll("input[name=theme]");
try {
  const held = localStorage.getItem("expunge-theme");
  for (const theme of themes) if (theme.value === held) theme.checked = true;
  for (const theme of themes) theme.addEventListener("change", () => localStorage.setItem("expunge-theme", theme.value));
} catch {
  // Where nothing may be stored the choice lasts as long as the page is open.
}
