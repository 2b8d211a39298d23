/* The recurrence of an LSTM, all steps in one call, and its gradients:
 *
 *   i f g o = gates[t] + h w^T,  c = sigmoid(f) c + sigmoid(i) tanh(g),  h = sigmoid(o) tanh(c)
 *
 * gates (T, B, 4H) are what the input adds; w (4H, H) is packed before, in the order in which it is read. Libraries for
 * matrices of all shapes pack it at every step, which takes as long as the product when the batch is small. The rows of
 * the batch are divided among threads and do not wait for each other.
 *
 * The code is written once for a vector of LANES numbers (lstm.h) and compiled for every kind of processor.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "turn.h"

#define DEEP 256       /* length of the sums that are made at once: a stripe of w that long stays in the first cache */
#define TALL 96        /* rows of the batch whose states stay in cache, while w comes from further away */
#define LONG 240       /* rows that are summed at once for the gradient of w; a power of two is slower: lines compete */
#define GATES 48       /* lines of that gradient that are made at once; a multiple of all ROWS, and of 4 */
#define MOST_STRIPES 4 /* of columns at once, where there are few rows */

#define KERNEL "lstm.h"
#include "widths.h"

/* Numbers of a packed w. */
long lstm_packed(long hidden, int backward) {
    return 1 + (backward ? CALL(lstm_packed, hidden, 4 * hidden) : CALL(lstm_packed, 4 * hidden, hidden));
}

/* w (4H, H) for the forward product, or for the backward one. */
void lstm_pack(const float *w, float *packed, long hidden, int backward) {
    if (backward)
        CALL(lstm_pack, w, packed, hidden, 4 * hidden, 0);
    else
        CALL(lstm_pack, w, packed, 4 * hidden, hidden, 1);
}

/* The batch is divided into as many parts as there are threads, or more, and none of them is taller than TALL. */
static long rows_of_a_part(long batch, long threads) {
    long parts = (batch + TALL - 1) / TALL;
    parts = (parts + threads - 1) / threads * threads;
    return parts ? (batch + parts - 1) / parts : 1;
}

/* h and c (B, H) are the first state; out (T, B, H). With `train`, `cells` (T, B, H) and `active` (T, B, 4H) get what the
 * gradient needs, without it `cells` (B, H) gets the last c and `active` (B, 4H) is used on the way. The last state is
 * written to last_h and, if that is not NULL, last_c as well. */
void lstm_forward(const float *gates, const float *packed, const float *h, const float *c, float *out, float *cells,
                  float *active, float *last_h, float *last_c, int train, long steps, long batch, long hidden,
                  int threads) {
    const long each = rows_of_a_part(batch, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long first = 0; first < batch; first += each)
        CALL(lstm_forward, gates, packed, h, c, out, cells, active, last_h, last_c, train, steps, batch, hidden, first,
             batch - first < each ? batch - first : each);
}

/* d_gates (T, B, 4H) from d_out (T, B, H), or NULL, and the gradients dh and dc (B, H) of the last state, which become
 * those of the first one; dh does so only if `whole`. */
void lstm_backward(const float *d_out, const float *packed, const float *active, const float *cells, const float *c,
                   float *dh, float *dc, float *d_gates, int whole, long steps, long batch, long hidden, int threads) {
    const long each = rows_of_a_part(batch, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long first = 0; first < batch; first += each)
        CALL(lstm_backward, d_out, packed, active, cells, c, dh, dc, d_gates, whole, steps, batch, hidden, first,
             batch - first < each ? batch - first : each);
}

/* d_weight (4H, H), the gradient of w: d_gates (T, B, 4H) times the states before, which lie in h (B, H) and out
 * (T, B, H), summed over all rows. Threads divide its lines and leave the bits. Returns 1 if there is no memory. */
int lstm_weight_gradient(const float *d_gates, const float *h, const float *out, float *d_weight, long steps,
                         long batch, long hidden, int threads) {
    const long skipped = CALL(lstm_rests, h, d_gates, batch * hidden) ? batch : 0, rows = steps * batch - skipped;
    const long slices = (rows + LONG - 1) / LONG, each = slices ? (rows + slices - 1) / slices : 1;
    float *packed = malloc(sizeof(float) * (CALL(lstm_packed, hidden, rows) + 1));
    if (!packed) return 1;
    CALL(lstm_pack_states, h, out, packed, batch, hidden, skipped, rows, each);
    if (!rows) memset(d_weight, 0, sizeof(float) * 4 * hidden * hidden);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long g = 0; g < 4 * hidden; g += GATES)
        CALL(lstm_weight_gradient, d_gates + skipped * 4 * hidden + g, packed, d_weight + g * hidden, hidden, rows,
             each, 4 * hidden - g < GATES ? 4 * hidden - g : GATES);
    free(packed);
    return 0;
}
