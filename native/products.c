/* All products of weights of a plan in one call, and their gradients. They are small, and each as an operation of its own
 * takes longer to be called than to be made, above all behind a pass over x, which leaves nothing in the caches.
 *
 * A product is out (batch, rows, columns) = a (batch, rows, summed) b (batch, summed, columns). A table says where the
 * numbers of an operand lie in the tensor they come from, or where those of the result go to; without one, they lie as
 * they are read. Every tensor is an operand of one product at most.
 */
#include <stdlib.h>
#include <string.h>

typedef struct product {
    long a, b, out;                      /* tensors */
    long batch, rows, summed, columns;
    long a_table, b_table, out_table;    /* where they begin among all tables; -1: none */
} product;

static const float *gathered(const float *restrict from, const int *restrict tables, long table, float *restrict to, long size) {
    if (table < 0) return from;
    for (long i = 0; i < size; i++) to[i] = from[tables[table + i]];
    return to;
}

static void scatter(const float *restrict from, const int *restrict tables, long table, float *restrict to, long size) {
    for (long i = 0; i < size; i++) to[tables[table + i]] = from[i];
}

/* Numbers of both operands, or of the result if these are more. */
static long largest(const product *p) {
    long operands = (p->rows + p->columns) * p->summed, out = p->rows * p->columns;
    return p->batch * (operands > out ? operands : out);
}

static void multiply(const product *p, const float *restrict a, const float *restrict b, float *restrict out) {
    const long columns = p->columns;
    memset(out, 0, sizeof(float) * p->batch * p->rows * columns);
    for (long n = 0; n < p->batch; n++, b += p->summed * columns)
        for (long i = 0; i < p->rows; i++, out += columns)
            for (long k = 0; k < p->summed; k++, a++)
                for (long j = 0; j < columns; j++) out[j] += *a * b[k * columns + j];
}

/* The sum of products of two lines, four at a time: one after the other, each would wait for the one before. */
static float dot(const float *a, const float *b, long size) {
    float sums[4] = {0}, rest = 0;
    long i = 0;
    for (; i + 4 <= size; i += 4)
        for (int j = 0; j < 4; j++) sums[j] += a[i + j] * b[i + j];
    for (; i < size; i++) rest += a[i] * b[i];
    return sums[0] + sums[1] + sums[2] + sums[3] + rest;
}

static void multiply_back(const product *p, const float *restrict a, const float *restrict b, const float *restrict up,
                          float *restrict of_a, float *restrict of_b) {
    const long columns = p->columns;
    memset(of_b, 0, sizeof(float) * p->batch * p->summed * columns);
    for (long n = 0; n < p->batch; n++, b += p->summed * columns, of_b += p->summed * columns)
        for (long i = 0; i < p->rows; i++, up += columns)
            for (long k = 0; k < p->summed; k++, a++, of_a++) {
                for (long j = 0; j < columns; j++) of_b[k * columns + j] += *a * up[j];
                *of_a = dot(up, b + k * columns, columns);
            }
}

/* Whether a tensor is an operand of one of these products. */
static int used(const product *list, const product *end, long tensor) {
    for (; list < end; list++)
        if (list->a == tensor || list->b == tensor) return 1;
    return 0;
}

/* The products in their order. Tensors that are NULL are made on the way, in memory of their own. With `gradients`, these
 * are made instead: from those of the results, where NULL stands for zeros, those of the tensors, where NULL stands for
 * one that nobody wants; of the results, only what other products need is made. Returns 1 if there is no memory. */
int products(const product *list, long count, const int *tables, float *const *given, const long *sizes, long tensors,
             float *const *gradients) {
    const product *end = list + count;
    long most = 0, beside = 0;
    for (const product *p = list; p < end; p++) most = largest(p) > most ? largest(p) : most;
    for (long i = 0; i < tensors; i++) beside += (given[i] ? 0 : sizes[i]) + (gradients && !gradients[i] ? sizes[i] : 0);
    float *memory = malloc(sizeof(float) * (4 * most + beside)), *next = memory + 4 * most;
    float **all = malloc(sizeof(float *) * 2 * tensors), **of = all + tensors;
    const int failed = !memory || !all;
    for (long i = 0; i < tensors && !failed; i++) {
        all[i] = given[i] ? given[i] : next;
        next += given[i] ? 0 : sizes[i];
        of[i] = !gradients ? NULL : gradients[i] ? gradients[i] : memset(next, 0, sizeof(float) * sizes[i]);
        next += gradients && !gradients[i] ? sizes[i] : 0;
    }
    float *first = memory, *second = memory + most, *third = memory + 2 * most, *fourth = memory + 3 * most;
    for (const product *p = list; p < end && !failed; p++) {
        if (gradients && !used(list, end, p->out)) continue;
        const float *a = gathered(all[p->a], tables, p->a_table, first, p->batch * p->rows * p->summed);
        const float *b = gathered(all[p->b], tables, p->b_table, second, p->batch * p->summed * p->columns);
        float *out = p->out_table < 0 ? all[p->out] : third;
        multiply(p, a, b, out);
        if (out == third) scatter(out, tables, p->out_table, all[p->out], p->batch * p->rows * p->columns);
    }
    for (const product *p = end - 1; p >= list && gradients && !failed; p--) {
        const long a_size = p->batch * p->rows * p->summed, b_size = p->batch * p->summed * p->columns;
        const float *a = gathered(all[p->a], tables, p->a_table, first, a_size);
        const float *b = gathered(all[p->b], tables, p->b_table, second, b_size);
        const float *up = gathered(of[p->out], tables, p->out_table, third, p->batch * p->rows * p->columns);
        float *of_a = p->a_table < 0 ? of[p->a] : fourth, *of_b = p->b_table < 0 ? of[p->b] : fourth + a_size;
        multiply_back(p, a, b, up, of_a, of_b);
        if (p->a_table >= 0) scatter(of_a, tables, p->a_table, of[p->a], a_size);
        if (p->b_table >= 0) scatter(of_b, tables, p->b_table, of[p->b], b_size);
    }
    free(all);
    free(memory);
    return failed;
}
