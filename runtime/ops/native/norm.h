// The gradient of an RMSNorm for one row, also for ops that compute its dy in the same pass.
#pragma once

#include "simd.h"

// dx = rstd·(dy·w − x·rstd²·mean(dy·w·x)), plus `add` if it is not null; both are rounded.
template <class T>
INLINE void rmsnorm_dgrad_row(long D, const T *dy, const T *x, const T *w, float rstd, const T *add, T *dx) {
  V dots = {};
  each(D, [&](long i, long n) { dots += get(dy + i, n) * get(w + i, n) * get(x + i, n); });
  const float slope = sum(dots) / D * rstd * rstd;
  each(D, [&](long i, long n) {
    const V v = (get(dy + i, n) * get(w + i, n) - get(x + i, n) * slope) * rstd;
    set(dx + i, add ? rounded<T>(v) + get(add + i, n) : v, n);
  });
}
