"""Networks, data and scenarios for images."""
