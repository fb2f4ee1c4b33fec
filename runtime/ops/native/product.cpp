// Products of FP32 matrices of any size and layout, in blocks that fit the caches.
#include "few_rows.h"
#include "product.h"

namespace {

constexpr long INNER = 256;          // inner extent of a block: a panel of 64 columns of b is 64 KiB
constexpr long LEFT = 72 * 1024;     // elements of a block of a: 288 KiB, a part of L2
constexpr long PANEL = WIDE * W;     // columns of b at a time
constexpr long STRIP = REGISTERS / WIDE;  // rows of a transposed a that are stored together
constexpr long STRIDE = 1024;        // from this row stride on, rows of b share too few sets of L1

struct Right {
  const float *b;
  long bk, bn;  // b(k, n) = b[k·bk + n·bn]: one of them is 1
};

// Copy columns n0 … n0 + PANEL of b into rows of PANEL elements, with zeros after the last column.
void take_panel(Right r, long K, long n0, long columns, float *panel) {
  if (r.bn == 1) {
    for (long k = 0; k < K; k++) {
      const float *from = r.b + k * r.bk + n0;
      for (long n = 0; n < columns; n++) panel[k * PANEL + n] = from[n];
    }
  } else {
    transpose(r.b + n0 * r.bn, r.bn, columns, K, panel, PANEL);
  }
  if (columns < PANEL)
    for (long k = 0; k < K; k++) std::fill(panel + k * PANEL + columns, panel + (k + 1) * PANEL, 0.0f);
}

template <bool ADD>
void block(Left l, const float *b, long ldb, float *c, long ldc, long M, long N, long K, Soon *soon) {
  const long whole = N / W * W;
  small_product<ADD>(l, b, ldb, c, ldc, M, whole, K, soon);
  if (whole == N) return;
  // The last columns go through a buffer, because c has no whole vector there. b has one: its panel is padded.
  const long left = N - whole;
  float part[32 * W];
  for (long m = 0; m < M; m += 32) {
    const long R = std::min(32L, M - m);
    small_product<false>(l.at(m, 0), b + whole, ldb, part, W, R, W, K);
    for (long r = 0; r < R; r++)
      for (long n = 0; n < left; n++) {
        float &to = c[(m + r) * ldc + whole + n];
        to = ADD ? to + part[r * W + n] : part[r * W + n];
      }
  }
}

// Copy rows of a transposed a into strips of STRIP rows, as tiles read them: strip[k·STRIP + m]. `apart`: strip stride.
void take_strips(Left l, long M, long K, float *strips, long apart) {
  for (long k = 0; k < K; k++) {
    const float *from = l.a + k * l.ak;
    for (long m = 0; m < M; m += W) prefetch(from + 8 * l.ak + m);
    float *to = strips + k * STRIP;
    long m = 0;
    for (; m + STRIP <= M; m += STRIP, to += apart) memcpy(to, from + m, 4 * STRIP);
    if (m < M) memcpy(to, from + m, 4 * (M - m));
  }
}

// c = a·b, or c += a·b.
void product(long M, long N, long K, Left l, Right r, float *c, long ldc, bool add) {
  if (K == 0 && !add)
    for (long m = 0; m < M; m++) std::fill_n(c + m * ldc, N, 0.0f);
  const bool packed = r.bn != 1 || r.bk >= STRIDE || N % W;
  const bool strips = l.am == 1 && l.ak != 1;
  const long inner = std::min(INNER, K), blocks = M * inner / LEFT + 1, most = (M / blocks + 24) / 24 * 24;
  const long apart = STRIP * inner + W;
  Buffer panels(packed ? (N + PANEL - 1) / PANEL * PANEL * inner : 0), lefts(strips ? (most / STRIP + 1) * apart : 0);
  const long group = packed ? M : most;  // rows that are summed over all of K at a time, to stay in the cache
  for (long first = 0; first < M; first += group)
    for (long k = 0; k < K; k += INNER) {
      const long Kb = std::min(INNER, K - k), last = std::min(M, first + group);
      const Right rk{r.b + k * r.bk, r.bk, r.bn};
      if (packed)
        for (long n = 0; n < N; n += PANEL) take_panel(rk, Kb, n, std::min(PANEL, N - n), panels.data() + n * Kb);
      for (long m = first; m < last; m += most) {
        const long Mb = std::min(most, M - m);
        const Left lk = l.at(m, k);
        if (strips) take_strips(lk, Mb, Kb, lefts.data(), apart);
        for (long n = 0; n < N; n += PANEL) {
          const float *b = packed ? panels.data() + n * Kb : rk.b + n;
          const long ldb = packed ? PANEL : rk.bk, Nb = std::min(PANEL, N - n);
          Soon soon;  // the next panel, or the first panel of the next block
          if (n + PANEL < N)
            soon = packed ? Soon(b + PANEL * Kb, PANEL * Kb, 0, 1)
                          : Soon(b + PANEL, std::min(PANEL, N - n - PANEL), ldb, Kb);
          else if (!packed)
            soon = {rk.b + INNER * rk.bk, std::min(PANEL, N), ldb, std::min(INNER, K - k - Kb)};
          const auto multiply = [&](Left from, long i, long rows) {
            float *to = c + (m + i) * ldc + n;
            add || k ? block<true>(from, b, ldb, to, ldc, rows, Nb, Kb, &soon)
                     : block<false>(from, b, ldb, to, ldc, rows, Nb, Kb, &soon);
          };
          if (strips)
            for (long i = 0; i < Mb; i += STRIP)
              multiply({lefts.data() + i / STRIP * apart, 1, STRIP}, i, std::min(STRIP, Mb - i));
          else
            multiply(lk, 0, Mb);
        }
      }
    }
}

}  // namespace

extern "C" void product_float32(long M, long N, long K, const float *a, long a_stride_m, long a_stride_k,
                                const float *b, long b_stride_k, long b_stride_n, float *c, long c_stride, long add) {
  if (M <= FEW && !add && a_stride_k == 1 && b_stride_k == 1)
    return few_rows(M, N, K, a, a_stride_m, b, b_stride_n, c, c_stride);
  product(M, N, K, {a, a_stride_m, a_stride_k}, {b, b_stride_k, b_stride_n}, c, c_stride, add);
}

// Products of the rows of each expert with its weight [N, K]. They call the function above, so that compilers make one
// copy of the product, with its tiles inlined.
extern "C" void grouped_linear_float32(long E, const int *offsets, long N, long K, const float *x, long x_stride,
                                       const float *w, float *y) {
  each_group(E, offsets, [&](long e, long start, long rows) {
    product_float32(rows, N, K, x + start * x_stride, x_stride, 1, w + e * N * K, 1, K, y + start * N, N, false);
  });
}

extern "C" void grouped_linear_dgrad_float32(long E, const int *offsets, long N, long K, const float *dy, long dy_stride,
                                             const float *w, float *dx) {
  each_group(E, offsets, [&](long e, long start, long rows) {
    product_float32(rows, K, N, dy + start * dy_stride, dy_stride, 1, w + e * N * K, K, 1, dx + start * K, K, false);
  });
}

extern "C" void grouped_linear_wgrad_float32(long E, const int *offsets, long N, long K, const float *dy, long dy_stride,
                                             const float *x, long x_stride, float *acc) {
  each_group(E, offsets, [&](long e, long start, long rows) {
    product_float32(N, K, rows, dy + start * dy_stride, 1, dy_stride, x + start * x_stride, x_stride, 1, acc + e * N * K, K,
                    true);
  });
}
