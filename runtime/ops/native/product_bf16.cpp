// Products of BF16 matrices, summed in FP32 by AVX512-BF16 instructions: c = a·b in BF16, or c += a·b in FP32.
//
// An instruction multiplies two neighbours of the inner dimension, stored as one 32-bit element. So the columns of b
// are packed into panels of such pairs, and so is a, unless its rows already consist of aligned pairs.
#include <type_traits>

#include "few_rows.h"
#include "product.h"

#if defined(__AVX512BF16__)
namespace {

constexpr long INNER = 128;        // inner extent of a block in pairs, if c is FP32
constexpr long LEFT = 72 * 1024;   // pairs of a block of a: 288 KiB, a part of L2
constexpr long PANEL = WIDE * W;   // columns of b at a time
constexpr long STRIP = 6;          // rows of a that are stored together when packed
constexpr long AFTER = 16;         // distance in rows at which rows are prefetched before packing

// to[j] = the pair (even[j], odd[j]) for n columns; odd is null after the last row.
void interleave(const bf16 *even, const bf16 *odd, long n, float *to) {
  long j = 0;
  for (; j + W <= n; j += W) {
    VH low, high = {};
    memcpy(&low, even + j, sizeof low);
    if (odd) memcpy(&high, odd + j, sizeof high);
    const VU pairs = extend(low) | (extend(high) << 16);
    memcpy(to + j, &pairs, sizeof pairs);
  }
  for (; j < n; j++) {
    const uint32_t pair = even[j].bits | (odd ? uint32_t(odd[j].bits) << 16 : 0);
    memcpy(to + j, &pair, 4);
  }
}

struct Matrix {
  const bf16 *x;
  long rows, columns;  // strides: one of them is 1
  Matrix at(long row, long column) const { return {x + row * rows + column * columns, rows, columns}; }
  Matrix turned() const { return {x, columns, rows}; }
};

// The block of `rows` rows and `columns` columns, whichever of them is contiguous.
Soon soon(Matrix m, long rows, long columns, Soon *then = nullptr) {
  return m.rows == 1 ? Soon(m.x, rows, m.columns, columns, then) : Soon(m.x, columns, m.rows, rows, then);
}

// to[k/2·ld + j] = the pair (x(k, j0 + j), x(k + 1, j0 + j)), for n columns and all K rows.
void take(Matrix m, long K, long j0, long n, float *to, long ld) {
  const bf16 *x = m.x + j0 * m.columns;
  if (m.columns == 1) {
    for (long k = 0; k < K; k += 2) {
      const bf16 *after = x + (k + AFTER) * m.rows;
      for (long j = 0; j < n; j += 2 * W) prefetch(after + j), prefetch(after + m.rows + j);
      interleave(x + k * m.rows, k + 1 < K ? x + (k + 1) * m.rows : nullptr, n, to + k / 2 * ld);
    }
    return;
  }
  if (m.columns % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 4 == 0)  // rows consist of aligned 32-bit pairs
    transpose(reinterpret_cast<const float *>(x), m.columns / 2, n, K / 2, to, ld);
  else
    for (long k = 0; k + 1 < K; k += 2)
      for (long j = 0; j < n; j++) memcpy(to + k / 2 * ld + j, x + j * m.columns + k, 4);
  if (K % 2)
    for (long j = 0; j < n; j++) {
      const uint32_t last = x[j * m.columns + K - 1].bits;
      memcpy(to + K / 2 * ld + j, &last, 4);
    }
}

// Pack the pairs of M rows of a: strips[m/STRIP·apart + k/2·STRIP + m%STRIP]. `row` has room for M pairs.
void take_strips(Matrix a, long M, long K, float *strips, long apart, float *row) {
  const Matrix turned = a.turned();
  for (long k = 0; k < K; k += 2) {
    take(turned.at(k, 0), std::min(2L, K - k), 0, M, row, 0);
    float *to = strips + k / 2 * STRIP;
    long m = 0;
    for (; m + STRIP <= M; m += STRIP, to += apart) memcpy(to, row + m, 4 * STRIP);
    if (m < M) memcpy(to, row + m, 4 * (M - m));
  }
}

INLINE void put(float *c, V v, long n) { n == W ? store(c, load(c) + v) : store(c, load(c, n) + v, n); }
INLINE void put(bf16 *c, V v, long n) { n == W ? store(c, v) : store(c, v, n); }

// A tile of R rows and U vectors. Pair k of row r of a is a[r·am + k·ak].
template <int R, int U, class T>
INLINE void tile(const float *a, long am, long ak, const float *b, T *c, long ldc, long columns, long pairs,
                 Soon &soon) {
  V acc[R][U];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) acc[r][u] = V{}, prefetch_to_write(c + r * ldc + u * W);
  const auto step = [&](long k) {
    V right[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) right[u] = load(b + k * PANEL + u * W);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      const V left = all(a[r * am + k * ak]);
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) acc[r][u] = (V)_mm512_dpbf16_ps((__m512)acc[r][u], (__m512bh)left, (__m512bh)right[u]);
    }
  };
  Soon &now = *soon.current();  // the next panel, then the next block of the operands
  long k = 0;
  for (; k + W <= pairs; k += W) {
    if (ak == 1)  // prefetch the next rows
#pragma GCC unroll 32
      for (int r = 0; r < R; r++) prefetch(a + (R + r) * am + k);
    for (long i = 0; i < W; i += OFTEN) {
      now.ask();
#pragma GCC unroll 2
      for (int j = 0; j < OFTEN; j++) step(k + i + j);
    }
  }
  for (; k < pairs; k++) step(k);
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) put(c + r * ldc + u * W, acc[r][u], std::min(long(W), columns - u * W));
}

template <int R, int U, class T>
INLINE void rows(const float *a, long am, long ak, const float *b, T *c, long ldc, long M, long columns, long pairs,
                 Soon &soon) {
  for (; M >= R; M -= R, a += R * am, c += R * ldc) tile<R, U>(a, am, ak, b, c, ldc, columns, pairs, soon);
  if constexpr (R > 1) {
    if (M) rows<(R + 1) / 2, U>(a, am, ak, b, c, ldc, M, columns, pairs, soon);
  }
}

template <class T>
void panel_product(const float *a, long am, long ak, const float *b, T *c, long ldc, long M, long columns, long pairs,
                   Soon &soon) {
  if (columns > 3 * W)
    rows<6, 4>(a, am, ak, b, c, ldc, M, columns, pairs, soon);
  else if (columns > 2 * W)
    rows<8, 3>(a, am, ak, b, c, ldc, M, columns, pairs, soon);
  else if (columns > W)
    rows<12, 2>(a, am, ak, b, c, ldc, M, columns, pairs, soon);
  else
    rows<12, 1>(a, am, ak, b, c, ldc, M, columns, pairs, soon);
}

template <class T> void product(long M, long N, long K, Matrix a, Matrix b, T *c, long ldc) {
  const long inner = std::max(1L, std::is_same_v<T, float> ? std::min(2 * INNER, K) : K), most_pairs = (inner + 1) / 2;
  const long panels = (N + PANEL - 1) / PANEL, blocks = M * most_pairs / LEFT + 1, most = (M / blocks + 24) / 24 * 24;
  // a needs no packing if its rows are contiguous and consist of whole aligned pairs.
  const bool packed = a.columns != 1 || a.rows % 2 || K % 2 || reinterpret_cast<uintptr_t>(a.x) % 4;
  const long apart = STRIP * most_pairs + W;
  Buffer right(panels * PANEL * most_pairs), left(packed ? (most / STRIP + 1) * apart : 0), row(packed ? most : 0);
  for (long k = 0; k < K || k == 0; k += inner) {
    const long Kb = std::min(inner, K - k), pairs = (Kb + 1) / 2, next = std::min(inner, K - k - Kb);
    Soon next_left = soon(a.at(0, k + Kb), M, next), next_right = soon(b.at(k + Kb, 0).turned(), N, next, &next_left);
    for (long n = 0; n < N; n += PANEL)
      take(b.at(k, 0), Kb, n, std::min(PANEL, N - n), right.data() + n * pairs, PANEL);
    for (long m = 0; m < M; m += most) {
      const long Mb = std::min(most, M - m);
      const Matrix from = a.at(m, k);
      if (packed) take_strips(from, Mb, Kb, left.data(), apart, row.data());
      for (long n = 0; n < N; n += PANEL) {
        const long columns = std::min(PANEL, N - n);
        const float *panel = right.data() + n * pairs;
        Soon soon(panel + PANEL * pairs, PANEL * pairs, 0, n + PANEL < N, &next_right);
        T *to = c + m * ldc + n;
        const auto *unpacked = reinterpret_cast<const float *>(from.x);
        if (!packed)
          panel_product(unpacked, a.rows / 2, 1, panel, to, ldc, Mb, columns, pairs, soon);
        else
          for (long i = 0; i < Mb; i += STRIP)
            panel_product(left.data() + i / STRIP * apart, 1, STRIP, panel, to + i * ldc, ldc, std::min(STRIP, Mb - i),
                          columns, pairs, soon);
      }
    }
  }
}

}  // namespace

extern "C" void product_bfloat16(long M, long N, long K, const bf16 *a, long a_stride_m, long a_stride_k,
                                 const bf16 *b, long b_stride_k, long b_stride_n, void *c, long c_stride, long add) {
  const Matrix left{a, a_stride_m, a_stride_k}, right{b, b_stride_k, b_stride_n};
  if (M <= FEW && !add && a_stride_k == 1 && b_stride_k == 1)
    few_rows(M, N, K, a, a_stride_m, b, b_stride_n, static_cast<bf16 *>(c), c_stride);
  else if (add)
    product(M, N, K, left, right, static_cast<float *>(c), c_stride);
  else
    product(M, N, K, left, right, static_cast<bf16 *>(c), c_stride);
}

// Products of the rows of each expert with its weight [N, K]. They call the function above, so that compilers make one
// copy of the product, with its tiles inlined.
extern "C" void grouped_linear_bfloat16(long E, const int *offsets, long N, long K, const bf16 *x, long x_stride,
                                       const bf16 *w, bf16 *y) {
  each_group(E, offsets, [&](long e, long start, long rows) {
    product_bfloat16(rows, N, K, x + start * x_stride, x_stride, 1, w + e * N * K, 1, K, y + start * N, N, false);
  });
}

extern "C" void grouped_linear_dgrad_bfloat16(long E, const int *offsets, long N, long K, const bf16 *dy, long dy_stride,
                                             const bf16 *w, bf16 *dx) {
  each_group(E, offsets, [&](long e, long start, long rows) {
    product_bfloat16(rows, K, N, dy + start * dy_stride, dy_stride, 1, w + e * N * K, K, 1, dx + start * K, K, false);
  });
}

extern "C" void grouped_linear_wgrad_bfloat16(long E, const int *offsets, long N, long K, const bf16 *dy, long dy_stride,
                                             const bf16 *x, long x_stride, float *acc) {
  each_group(E, offsets, [&](long e, long start, long rows) {
    product_bfloat16(N, K, rows, dy + start * dy_stride, 1, dy_stride, x + start * x_stride, x_stride, 1, acc + e * N * K, K,
                    true);
  });
}
#endif
