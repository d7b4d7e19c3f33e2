/* Backward through scale·(x − μ), one element type and one instruction set: g·scale, and by sample and channel Σ g and Σ g·(x − μ) over the
   positions, all of it in one reading of x and g. */

#define LANES (BYTES / (int64_t)sizeof(REAL))

/* Some channels of one sample, as many vectors as `wide` says. */
#define COLUMNS(name, wide)                                                                                                      \
    TARGET static void NAME(name)(const REAL *x, const REAL *g, const REAL *mean, const REAL *scale, int64_t positions,          \
                                  int64_t channels, REAL *back, REAL *plain, REAL *centred) {                                    \
        NAME(vector) sums[2][wide];                                                                                              \
        memset(sums, 0, sizeof sums);                                                                                            \
        for (int64_t start = 0; start < positions; start += BLOCK) {                                                             \
            int64_t end = start + BLOCK < positions ? start + BLOCK : positions;                                                 \
            NAME(vector) part[2][wide];                                                                                          \
            memset(part, 0, sizeof part);                                                                                        \
            for (int64_t place = start * channels; place < end * channels; place += channels) {                                  \
                _Pragma("GCC unroll 4") for (int j = 0; j < wide; j++) {                                                         \
                    NAME(vector) slope = *(const NAME(vector) *)(g + place + j * LANES);                                         \
                    NAME(vector) value = *(const NAME(vector) *)(x + place + j * LANES);                                         \
                    part[0][j] += slope;                                                                                         \
                    part[1][j] += slope * (value - *(const NAME(vector) *)(mean + j * LANES));                                   \
                    *(NAME(vector) *)(back + place + j * LANES) = slope * *(const NAME(vector) *)(scale + j * LANES);            \
                }                                                                                                                \
            }                                                                                                                    \
            for (int j = 0; j < wide; j++) sums[0][j] += part[0][j], sums[1][j] += part[1][j];                                   \
        }                                                                                                                        \
        for (int j = 0; j < wide; j++) {                                                                                         \
            *(NAME(vector) *)(plain + j * LANES) = sums[0][j];                                                                   \
            *(NAME(vector) *)(centred + j * LANES) = sums[1][j];                                                                 \
        }                                                                                                                        \
    }

COLUMNS(four, 4)
COLUMNS(one, 1)

/* The same for a channel, where there are fewer than a vector holds. */
static void NAME(lone)(const REAL *x, const REAL *g, const REAL *mean, const REAL *scale, int64_t positions, int64_t channels, REAL *back,
                       REAL *plain, REAL *centred) {
    *plain = *centred = 0;
    for (int64_t start = 0; start < positions; start += BLOCK) {
        REAL part[2] = {0, 0};
        for (int64_t p = start; p < positions && p < start + BLOCK; p++) {
            REAL slope = g[p * channels];
            part[0] += slope;
            part[1] += slope * (x[p * channels] - *mean);
            back[p * channels] = slope * *scale;
        }
        *plain += part[0];
        *centred += part[1];
    }
}

/* x, g, back: (samples, positions, channels); mean, scale: (channels); plain, centred: (samples, channels). */
void NAME(scaled)(const REAL *x, const REAL *g, const REAL *mean, const REAL *scale, int64_t samples, int64_t positions, int64_t channels,
                  int64_t threads, REAL *back, REAL *plain, REAL *centred) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t n = 0; n < samples; n++) {
        int64_t from = n * positions * channels, row = n * channels, i = 0;
#define AT(function) NAME(function)(x + from + i, g + from + i, mean + i, scale + i, positions, channels, back + from + i, plain + row + i, centred + row + i)
        for (; i + 4 * LANES <= channels; i += 4 * LANES) AT(four);
        for (; i + LANES <= channels; i += LANES) AT(one);
        if (i < channels && channels >= LANES) {
            i = channels - LANES; /* some channels once more */
            AT(one);
        } else
            for (; i < channels; i++) AT(lone);
#undef AT
    }
}

#undef COLUMNS
#undef LANES
