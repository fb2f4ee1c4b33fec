// y[m, n] = Σ_k x[m, k]·w[n, k]: products of few rows of x, for which packing w takes longer than multiplying. w is read
// once for FEW rows. Rows are contiguous. A row of y has the bits that it has in a product of many rows.
//
// Operands are FP32 or BF16. If x or y is FP32, BF16 operands are widened.
#pragma once

#include "simd.h"

constexpr long FEW = 8;  // rows for which this is faster

template <class X, class T, class Y>
void few_rows(long M, long N, long K, const X *x, long x_stride, const T *w, long w_stride, Y *y, long y_stride);
