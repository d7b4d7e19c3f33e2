/* One element type and one instruction set; squares.c includes this for each. REAL is the type, BYTES the size of a vector, ROWS the
   input channels of a tile that is two vectors wide; one that is a vector wide has twice as many. */

#define LANES (BYTES / (int64_t)sizeof(REAL))

typedef REAL NAME(vector) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

#define TILE(name, rows, wide)                                                                                                   \
    TARGET static void NAME(name)(const REAL *image, const REAL *output, const struct window *w, int64_t out, REAL *total) {     \
        NAME(vector) sums[rows][wide];                                                                                           \
        memset(sums, 0, sizeof sums);                                                                                            \
        int64_t lines = BLOCK / w->places + 1;                                                                                   \
        for (int64_t start = 0; start < w->lines; start += lines) {                                                              \
            int64_t end = start + lines < w->lines ? start + lines : w->lines;                                                   \
            NAME(vector) part[rows][wide];                                                                                       \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++)                                                              \
                _Pragma("GCC unroll 2") for (int j = 0; j < wide; j++) part[i][j] = (NAME(vector)){0};                           \
            for (int64_t line = start; line < end; line++) {                                                                     \
                const REAL *a = image + line * w->image_line, *g = output + line * w->output_line;                               \
                for (int64_t place = 0; place < w->places; place++, a += w->image_place, g += out) {                             \
                    NAME(vector) slopes[wide];                                                                                   \
                    _Pragma("GCC unroll 2") for (int j = 0; j < wide; j++) slopes[j] = *(const NAME(vector) *)(g + j * LANES);   \
                    _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++)                                                      \
                        _Pragma("GCC unroll 2") for (int j = 0; j < wide; j++) part[i][j] += a[i] * slopes[j];                   \
                }                                                                                                                \
            }                                                                                                                    \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++)                                                              \
                _Pragma("GCC unroll 2") for (int j = 0; j < wide; j++) sums[i][j] += part[i][j];                                 \
        }                                                                                                                        \
        for (int i = 0; i < rows; i++)                                                                                           \
            for (int j = 0; j < wide; j++) *(NAME(vector) *)(total + i * out + j * LANES) += sums[i][j] * sums[i][j];            \
    }

TILE(broad, ROWS, 2)
TILE(narrow, 2 * ROWS, 1)

/* One tap of one sample, for one or two vectors of output channels and all input channels, which ROWS (twice where it is one) divides. */
TARGET static void NAME(strip)(const REAL *image, const REAL *output, const struct window *w, int64_t channels, int64_t out, int wide,
                               REAL *total) {
    for (int64_t i = 0; i < channels; i += wide ? ROWS : 2 * ROWS)
        (wide ? NAME(broad) : NAME(narrow))(image + i, output, w, out, total + i * out);
}

/* totals: (taps, channels, out), and as many of them as there are threads where each has its own; the first is the result. */
TARGET void NAME(squares)(const REAL *images, const REAL *outputs, const struct geometry *s, REAL *totals) {
    int64_t taps = s->kernel[0] * s->kernel[1], plane = s->channels * s->out, size = taps * plane;
    int64_t image = s->image[0] * s->image[1] * s->channels, output = s->output[0] * s->output[1] * s->out;
    int64_t strips = (s->out + 2 * LANES - 1) / (2 * LANES), pieces = taps * strips;
    int by_samples = s->by_samples != 0;
#pragma omp parallel num_threads((int)s->threads)
    {
        REAL *own = totals + (by_samples ? omp_get_thread_num() * size : 0);
        if (by_samples) memset(own, 0, size * sizeof(REAL));
#pragma omp for schedule(static)
        for (int64_t outer = 0; outer < (by_samples ? s->samples : pieces); outer++)
            for (int64_t inner = 0; inner < (by_samples ? pieces : s->samples); inner++) {
                int64_t sample = by_samples ? outer : inner, piece = by_samples ? inner : outer;
                int64_t tap = piece / strips, first = piece % strips * 2 * LANES;
                struct window w;
                REAL *total = own + tap * plane + first;
                if (!by_samples && sample == 0)
                    for (int64_t i = 0; i < s->channels; i++)
                        memset(total + i * s->out, 0, (s->out - first < 2 * LANES ? s->out - first : 2 * LANES) * sizeof(REAL));
                if (window_of(s, tap, &w))
                    NAME(strip)(images + sample * image + w.image_start, outputs + sample * output + w.output_start + first, &w,
                                s->channels, s->out, s->out - first >= 2 * LANES, total);
            }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (by_samples ? size : 0); i++)
            for (int64_t thread = 1; thread < omp_get_num_threads(); thread++) totals[i] += totals[thread * size + i];
    }
}

#undef TILE
#undef LANES
