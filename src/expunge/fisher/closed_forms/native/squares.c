/* Σ_n (dW_n)² of a two-dimensional convolution, or of a linear map on sequences, on the CPU, channels last: no patches, no padding, no
   gradients in memory.

   For sample n, tap u, input channel i and output channel o:  dW_n[u, i, o] = Σ_l a_n[l·stride + u·dilation − padding, i] · g_n[l, o].
   A tile of dW_n, some input channels by a vector or two of output channels, is summed in registers and then squared into the total.
   Output channels must be whole vectors.

   And the backward pass of a BatchNorm that is a scale and a shift (scaling.h).

   Threads are those of the OpenMP library that torch has loaded: this file is compiled with -fopenmp but linked against none. */

#include <omp.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 128 /* positions that are summed before the sum is put aside: rounding grows with the length of a sum */

/* by_samples: each thread takes samples and has a total of its own; else it takes parts of the weight. ends: the first row of every
   sample, and the end of the last, where samples are sequences of any length under a kernel of one tap; else NULL. */
struct geometry {
    int64_t samples, channels, out, image[2], output[2], kernel[2], stride[2], padding[2], dilation[2], threads, by_samples;
    const int64_t *ends;
};

int64_t geometry_bytes(void) { return sizeof(struct geometry); }

/* The positions at which a tap falls inside the image, `last` of them in the last line, and how far apart they lie in memory. */
struct window {
    int64_t lines, places, last, image_line, image_place, output_line;
};

/* Also where a sample's window begins; 0 where it is empty. */
static int window_of(const struct geometry *s, int64_t tap, int64_t sample, struct window *w, int64_t *image, int64_t *output) {
    int64_t index[2] = {tap / s->kernel[1], tap % s->kernel[1]}, first[2], count[2], start[2];
    for (int d = 0; d < 2; d++) {
        int64_t stride = s->stride[d], offset = index[d] * s->dilation[d] - s->padding[d], last = s->image[d] - 1 - offset;
        int64_t end = last < 0 ? 0 : last / stride + 1;
        first[d] = offset < 0 ? (stride - 1 - offset) / stride : 0;
        count[d] = (end < s->output[d] ? end : s->output[d]) - first[d];
        if (count[d] <= 0) return 0;
        start[d] = first[d] * stride + offset;
    }
    w->lines = count[0];
    w->places = w->last = count[1];
    w->image_line = s->stride[0] * s->image[1] * s->channels;
    w->image_place = s->stride[1] * s->channels;
    w->output_line = s->output[1] * s->out;
    *image = ((sample * s->image[0] + start[0]) * s->image[1] + start[1]) * s->channels;
    *output = ((sample * s->output[0] + first[0]) * s->output[1] + first[1]) * s->out;
    return 1;
}

/* The same of a sequence, cut into lines. */
static int sequence(const struct geometry *s, int64_t sample, struct window *w, int64_t *image, int64_t *output) {
    int64_t start = s->ends[sample], rows = s->ends[sample + 1] - start;
    if (rows <= 0) return 0;
    w->lines = (rows + BLOCK - 1) / BLOCK;
    w->places = w->lines > 1 ? BLOCK : rows;
    w->last = rows - (w->lines - 1) * BLOCK;
    w->image_line = BLOCK * s->channels;
    w->image_place = s->channels;
    w->output_line = BLOCK * s->out;
    *image = start * s->channels;
    *output = start * s->out;
    return 1;
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(word) JOIN(word, KIND)

#if defined(__x86_64__)

#define TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define BYTES 64
#define ROWS 8
#define REAL float
#define KIND float_512
#include "tiles.h"
#include "scaling.h"
#undef REAL
#undef KIND
#define REAL double
#define KIND double_512
#include "tiles.h"
#include "scaling.h"
#undef REAL
#undef KIND
#undef TARGET
#undef BYTES
#undef ROWS

#define TARGET __attribute__((target("avx2,fma")))
#define BYTES 32
#define ROWS 4
#define REAL float
#define KIND float_256
#include "tiles.h"
#include "scaling.h"
#undef REAL
#undef KIND
#define REAL double
#define KIND double_256
#include "tiles.h"
#include "scaling.h"

/* The bits of the widest vectors this processor has a version for; 0: none. */
int64_t vector_bits(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl")) return 256;
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") ? 512 : 256;
}

#else

int64_t vector_bits(void) { return 0; }

#endif
