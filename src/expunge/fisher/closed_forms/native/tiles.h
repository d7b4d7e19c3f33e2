/* One element type and one instruction set; squares.c includes this for each. REAL is the type, BYTES the size of a vector, ROWS the
   input channels of a tile that is two vectors wide; one that is a vector wide has twice as many. What is left of the input channels is
   taken REST at a time, then one by one. */

#define LANES (BYTES / (int64_t)sizeof(REAL))
#define REST 3

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
                int64_t places = line + 1 < w->lines ? w->places : w->last;                                                      \
                for (int64_t place = 0; place < places; place++, a += w->image_place, g += out) {                                \
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
TILE(broad_rest, REST, 2)
TILE(narrow_rest, REST, 1)
TILE(broad_last, 1, 2)
TILE(narrow_last, 1, 1)

/* One tap of one sample, for one or two vectors of output channels and all input channels. */
TARGET static void NAME(strip)(const REAL *image, const REAL *output, const struct window *w, int64_t channels, int64_t out, int wide,
                               REAL *total) {
    int64_t i = 0, rows = wide ? ROWS : 2 * ROWS;
    for (; i + rows <= channels; i += rows) (wide ? NAME(broad) : NAME(narrow))(image + i, output, w, out, total + i * out);
    for (; i + REST <= channels; i += REST) (wide ? NAME(broad_rest) : NAME(narrow_rest))(image + i, output, w, out, total + i * out);
    for (; i < channels; i++) (wide ? NAME(broad_last) : NAME(narrow_last))(image + i, output, w, out, total + i * out);
}

/* Added to the first of the totals, each (taps, channels, out); where a thread has its own there are as many as threads. */
TARGET void NAME(squares)(const REAL *images, const REAL *outputs, const struct geometry *s, REAL *first, REAL *others) {
    int64_t taps = s->kernel[0] * s->kernel[1], plane = s->channels * s->out, size = taps * plane;
    int64_t strips = (s->out + 2 * LANES - 1) / (2 * LANES), pieces = taps * strips;
    int by_samples = s->by_samples != 0;
#pragma omp parallel num_threads((int)s->threads)
    {
        int64_t thread = omp_get_thread_num();
        REAL *own = by_samples && thread ? others + (thread - 1) * size : first;
        if (own != first) memset(own, 0, size * sizeof(REAL));
#pragma omp for schedule(static)
        for (int64_t outer = 0; outer < (by_samples ? s->samples : pieces); outer++)
            for (int64_t inner = 0; inner < (by_samples ? pieces : s->samples); inner++) {
                int64_t sample = by_samples ? outer : inner, piece = by_samples ? inner : outer;
                int64_t tap = piece / strips, channel = piece % strips * 2 * LANES, image, output;
                struct window w;
                if (s->ends ? sequence(s, sample, &w, &image, &output) : window_of(s, tap, sample, &w, &image, &output))
                    NAME(strip)(images + image, outputs + output + channel, &w, s->channels, s->out, s->out - channel >= 2 * LANES,
                                own + tap * plane + channel);
            }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (by_samples ? size : 0); i++)
            for (int64_t thread = 1; thread < omp_get_num_threads(); thread++) first[i] += others[(thread - 1) * size + i];
    }
}

#undef TILE
#undef LANES
#undef REST
