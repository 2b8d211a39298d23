/* The last product of a plan, one for every group (the gates, as a rule), written where it belongs, and its gradients:
 *
 *   y[r, g, n] = bias[g, n] + sum over k of x[r, g, k] w[g, k, n]
 *
 * x has two strides, for groups and for rows, and w lies in the order (g, k, n). k is short and n a whole number of
 * registers. As a batch of matrices with strides, BLAS takes several times as long as the multiply-adds explain.
 *
 * The code is written once for a vector of LANES numbers (last.h) and compiled for every kind of processor.
 */
#include <stdlib.h>
#include <string.h>

#define SOME 8  /* rows whose share in the gradient of w is added at once */
#define PART 48 /* rows that stay in cache for both gradients */

#define KERNEL "last.h"
#include "widths.h"

void last_product(const float *x, long x_group, long x_row, const float *w, const float *bias, float *y, long rows,
                  long groups, long depth, long columns, int threads) {
    const long each = (rows + threads - 1) / threads, y_row = groups * columns;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        long start = t * each, some = rows - start < each ? rows - start : each;
        for (long g = 0; g < groups && some > 0; g++)
            CALL(last_product, x + g * x_group + start * x_row, x_row, w + g * depth * columns,
                 bias ? bias + g * columns : bias, y + start * y_row + g * columns, y_row, some, depth, columns);
    }
}

/* of_x lies as x does; of_w and of_bias are added to. Any of the three may be NULL. Returns 1 if there is no memory. */
int last_gradients(const float *x, long x_group, long x_row, const float *w, const float *up, float *of_x, float *of_w,
                   float *of_bias, long rows, long groups, long depth, long columns, int threads) {
    const long size = depth * columns, turned = CALL(last_turned, depth, columns);
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (long g = 0; g < groups; g++) {
        float *scratch = malloc(sizeof(float) * CALL(last_turned, depth, columns + PART));
        if (scratch)
            CALL(last_gradients, x + g * x_group, x_row, w + g * size, up + g * columns, groups * columns,
                 of_x ? of_x + g * x_group : of_x, of_w ? of_w + g * size : of_w,
                 of_bias ? of_bias + g * columns : of_bias, rows, depth, columns, scratch, scratch + turned);
        failed |= !scratch;
        free(scratch);
    }
    return failed;
}
