/* Products of matrices of any shape, with strides:
 *
 *   c[n] (rows, columns) = a[n] (rows, depth) b[n] (depth, columns), or added to what is there, for n in a batch
 *
 * The library that torch calls for them uses half of the width of an AMD processor with AVX-512, which is the only place
 * where these are called in use.
 *
 * The code is written once for a vector of LANES numbers (matrices.h) and compiled for every kind of processor, so that it
 * can be tested on all of them.
 */
#include <stdlib.h>
#include <string.h>

#include "turn.h"

#define DEEP 384         /* length of the sums that are made at once: a stripe of b that long stays near */
#define TALL 192         /* rows of a that stay in cache while all stripes go by */
#define MOST_COLUMNS 512 /* columns of b that are packed at once */

#define KERNEL "matrices.h"
#include "widths.h"

/* Strides count numbers; those of a and b are for n, rows and columns, c's columns lie together. Threads divide the rows of
 * all n, which leaves the bits. Returns 1 if there is no memory. */
int matrix_products(const float *a, long a_next, long a_row, long a_column, const float *b, long b_next, long b_row,
                    long b_column, float *c, long c_next, long c_row, int add, long batch, long rows, long depth,
                    long columns, int threads) {
    const long parts = batch >= threads ? 1 : threads, each = (rows + parts - 1) / parts; /* of the rows of one */
    const long widest = columns < MOST_COLUMNS ? (columns + 31) / 32 * 32 : MOST_COLUMNS, deepest = depth < DEEP ? depth : DEEP;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        float *packed = malloc(sizeof(float) * deepest * (widest + TALL));
        failed |= !packed;
#pragma omp for
        for (long i = 0; i < batch * parts; i++) {
            const long n = i / parts, start = i % parts * each, some = rows - start < each ? rows - start : each;
            if (!packed || some <= 0) continue;
            CALL(matrix_product, a + n * a_next + start * a_row, a_row, a_column, b + n * b_next, b_row, b_column,
                 c + n * c_next + start * c_row, c_row, add, some, depth, columns, packed, packed + deepest * widest);
        }
        free(packed);
    }
    return failed;
}

/* Whether this is a processor on which they are the faster ones. */
int amd(void) {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}
