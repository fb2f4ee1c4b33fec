// Passes over rows: norms, gated activations, cross entropy. Operands are FP32 or BF16; intermediates are FP32, and
// every result is rounded once. An operand that may be a view of columns has a row `stride`, in elements.
#include <cmath>

#include "norm.h"

namespace {

// y = x·rstd·w. If `more` is not null, x + more is stored in `sums`, and takes the place of x.
template <class T>
void rmsnorm(long R, long D, const T *x, long stride, const T *more, const T *w, float eps, T *sums, T *y,
             float *rstd) {
  for (long r = 0; r < R; r++, x += stride, y += D) {
    V squares = {};
    const T *from = more ? sums + r * D : x;
    each(D, [&](long i, long n) {
      V v = get(x + i, n);
      if (more) v = rounded<T>(v + get(more + r * D + i, n)), set(sums + r * D + i, v, n);
      squares += v * v;
    });
    const float scale = rstd[r] = 1 / std::sqrt(sum(squares) / D + eps);
    each(D, [&](long i, long n) { set(y + i, get(from + i, n) * scale * get(w + i, n), n); });
  }
}

template <class T>
void rmsnorm_dgrad(long R, long D, const T *dy, long dy_stride, const T *x, long stride, const T *w, const float *rstd,
                   const T *add, T *dx) {
  for (long r = 0; r < R; r++, dy += dy_stride, x += stride, dx += D)
    rmsnorm_dgrad_row(D, dy, x, w, rstd[r], add ? add + r * D : nullptr, dx);
}

// Sums blocks of 64 rows, then adds the blocks in order.
template <class T>
void rmsnorm_wgrad(long R, long D, float *acc, const T *dy, long dy_stride, const T *x, long stride, const float *rstd) {
  for (long start = 0; start < R; start += 64)
    each(D, [&](long i, long n) {
      V part = {};
      for (long r = start; r < start + 64 && r < R; r++)
        part += get(dy + r * dy_stride + i, n) * get(x + r * stride + i, n) * rstd[r];
      set(acc + i, get(acc + i, n) + part, n);
    });
}

// y = silu(g)·u of h = [g | u], times the gate weight of the row if there are gate weights.
template <class T> void swiglu(long R, long I, const T *h, const float *gate, T *y) {
  for (long r = 0; r < R; r++, h += 2 * I, y += I) {
    const float weight = gate ? gate[r] : 1;
    each(I, [&](long i, long n) {
      const V g = get(h + i, n);
      set(y + i, g * sigmoid(g) * get(h + I + i, n) * weight, n);
    });
  }
}

template <class T>
void swiglu_dgrad(long R, long I, const T *dy, const T *h, const float *gate, T *dh, float *dgate) {
  for (long r = 0; r < R; r++, dy += I, h += 2 * I, dh += 2 * I) {
    const float weight = gate ? gate[r] : 1;
    V dots = {};
    each(I, [&](long i, long n) {
      const V g = get(h + i, n), u = get(h + I + i, n), d = get(dy + i, n), s = sigmoid(g);
      const V value = d * g * s;
      dots += value * u;
      set(dh + I + i, value * weight, n);
      set(dh + i, d * u * weight * s * (1.0f + g * (1.0f - s)), n);
    });
    if (dgate) dgate[r] = sum(dots);
  }
}

// The loss is summed over rows with a target ≥ 0. A target that is no column makes the loss and the gradient NaN.
template <class T>
void cross_entropy(long R, long columns, const T *x, long stride, const int64_t *targets, float *loss, float *lse) {
  double total = 0;
  for (long r = 0; r < R; r++, x += stride) {
    V most = all(-INFINITY);
    each(columns, [&](long i, long n) {
      V v = get(x + i, n);
      if (n < W)
        for (long j = n; j < W; j++) v[j] = -INFINITY;
      most = larger(v, most);
    });
    const float top = largest(most);
    V weights = {};
    each(columns, [&](long i, long n) {
      V v = exp(get(x + i, n) - top);
      if (n < W)
        for (long j = n; j < W; j++) v[j] = 0;
      weights += v;
    });
    lse[r] = top + std::log(sum(weights));
    if (targets[r] >= 0) total += targets[r] < columns ? lse[r] - wide(x[targets[r]]) : NAN;
  }
  *loss = float(total);
}

template <class T>
void cross_entropy_dgrad(long R, long columns, const float *dloss, const T *x, long stride, const int64_t *targets,
                         const float *lse, T *dx) {
  for (long r = 0; r < R; r++, x += stride, dx += columns) {
    const float scale = targets[r] < 0 ? 0 : targets[r] < columns ? *dloss : NAN;
    each(columns, [&](long i, long n) { set(dx + i, exp(get(x + i, n) - lse[r]) * scale, n); });
    if (targets[r] >= 0 && targets[r] < columns) {
      const float weight = sum(exp(all(wide(x[targets[r]]) - lse[r]))) / W;
      put(dx + targets[r], (weight - 1) * scale);
    }
  }
}

// Rows of a table. A token below 0 is in another part of the table: its row is zeros.
template <class T> void embedding(long R, long D, const int64_t *tokens, const T *table, T *y) {
  for (long r = 0; r < R; r++, y += D) {
    if (tokens[r] >= 0)
      memcpy(y, table + tokens[r] * D, D * sizeof(T));
    else
      memset(y, 0, D * sizeof(T));
  }
}

// Add rows to those of their tokens, in order.
template <class T>
void embedding_wgrad(long R, long D, float *acc, const T *dy, long stride, const int64_t *tokens) {
  for (long r = 0; r < R; r++, dy += stride) {
    if (tokens[r] < 0) continue;
    float *to = acc + tokens[r] * D;
    each(D, [&](long i, long n) { set(to + i, get(to + i, n) + get(dy + i, n), n); });
  }
}

}  // namespace

// The digest of the sources from which this library was built.
extern "C" const char *digest() { return DIGEST; }

#define ROWS(T, suffix)                                                                                                \
  extern "C" void rmsnorm_##suffix(long R, long D, const T *x, long stride, const T *more, const T *w, float eps,      \
                                   T *sums, T *y, float *rstd) {                                                       \
    rmsnorm(R, D, x, stride, more, w, eps, sums, y, rstd);                                                             \
  }                                                                                                                    \
  extern "C" void rmsnorm_dgrad_##suffix(long R, long D, const T *dy, long dy_stride, const T *x, long stride,         \
                                         const T *w, const float *rstd, const T *add, T *dx) {                         \
    rmsnorm_dgrad(R, D, dy, dy_stride, x, stride, w, rstd, add, dx);                                                   \
  }                                                                                                                    \
  extern "C" void rmsnorm_wgrad_##suffix(long R, long D, float *acc, const T *dy, long dy_stride, const T *x,          \
                                         long stride, const float *rstd) {                                             \
    rmsnorm_wgrad(R, D, acc, dy, dy_stride, x, stride, rstd);                                                          \
  }                                                                                                                    \
  extern "C" void swiglu_##suffix(long R, long I, const T *h, const float *gate, T *y) { swiglu(R, I, h, gate, y); }   \
  extern "C" void swiglu_dgrad_##suffix(long R, long I, const T *dy, const T *h, const float *gate, T *dh,             \
                                        float *dgate) {                                                                \
    swiglu_dgrad(R, I, dy, h, gate, dh, dgate);                                                                        \
  }                                                                                                                    \
  extern "C" void cross_entropy_##suffix(long R, long columns, const T *x, long stride, const int64_t *targets,        \
                                         float *loss, float *lse) {                                                    \
    cross_entropy(R, columns, x, stride, targets, loss, lse);                                                          \
  }                                                                                                                    \
  extern "C" void cross_entropy_dgrad_##suffix(long R, long columns, const float *dloss, const T *x, long stride,      \
                                               const int64_t *targets, const float *lse, T *dx) {                      \
    cross_entropy_dgrad(R, columns, dloss, x, stride, targets, lse, dx);                                               \
  }
#define EMBEDDING(T, suffix)                                                                                           \
  extern "C" void embedding_##suffix(long R, long D, const int64_t *tokens, const T *table, T *y) {                    \
    embedding(R, D, tokens, table, y);                                                                                 \
  }                                                                                                                    \
  extern "C" void embedding_wgrad_##suffix(long R, long D, float *acc, const T *dy, long dy_stride,                    \
                                           const int64_t *tokens) {                                                    \
    embedding_wgrad(R, D, acc, dy, dy_stride, tokens);                                                                 \
  }
ROWS(float, float32)
ROWS(bf16, bfloat16)
EMBEDDING(float, float32)
EMBEDDING(bf16, bfloat16)
