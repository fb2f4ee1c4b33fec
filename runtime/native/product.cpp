// Products of FP32 matrices of any size and layout, in blocks that fit the caches.
#include "product.h"

namespace {

constexpr long INNER = 256;          // of a block: its panel of b, 64 columns, then is 64 KiB
constexpr long LEFT = 64 * 1024;     // elements of a block of a: 256 KiB, a part of L2
constexpr long PANEL = WIDE * W;     // columns of b at a time
constexpr long STRIDE = 512;         // elements from which rows of b fall into too few lines of L1

struct Right {
  const float *b;
  long bk, bn;  // b(k, n) = b[k·bk + n·bn]: one of them is 1
};

// Columns n0 … n0 + PANEL of b, zeros behind the last one, in rows of PANEL.
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

template <bool ADD> void block(Left l, const float *b, long ldb, float *c, long ldc, long M, long N, long K) {
  const long whole = N / W * W;
  small_product<ADD>(l, b, ldb, c, ldc, M, whole, K);
  if (whole == N) return;
  // The last columns by way of a buffer: c has no whole vector there. b has one, of a panel.
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

// c = a·b, or c += a·b.
void product(long M, long N, long K, Left l, Right r, float *c, long ldc, bool add) {
  if (K == 0 && !add)
    for (long m = 0; m < M; m++) std::fill_n(c + m * ldc, N, 0.0f);
  const bool packed = r.bn != 1 || r.bk >= STRIDE || N % W;
  const bool left_packed = l.am == 1 && l.ak >= STRIDE;
  const long inner = std::min(INNER, K), most = std::max(24L, std::min(M, LEFT / std::max(1L, inner)) / 24 * 24);
  Buffer panels(packed ? (N + PANEL - 1) / PANEL * PANEL * inner : 0), lefts(left_packed ? most * inner : 0);
  for (long k = 0; k < K; k += INNER) {
    const long Kb = std::min(INNER, K - k);
    const Right rk{r.b + k * r.bk, r.bk, r.bn};
    if (packed)
      for (long n = 0; n < N; n += PANEL) take_panel(rk, Kb, n, std::min(PANEL, N - n), panels.data() + n * Kb);
    for (long m = 0; m < M; m += most) {
      const long Mb = std::min(most, M - m);
      Left lk = l.at(m, k);
      if (left_packed) {
        for (long i = 0; i < Kb; i++) std::copy_n(lk.a + i * lk.ak, Mb, lefts.data() + i * Mb);
        lk = {lefts.data(), 1, Mb};
      }
      for (long n = 0; n < N; n += PANEL) {
        const float *b = packed ? panels.data() + n * Kb : rk.b + n;
        const long ldb = packed ? PANEL : rk.bk, Nb = std::min(PANEL, N - n);
        float *to = c + m * ldc + n;
        add || k ? block<true>(lk, b, ldb, to, ldc, Mb, Nb, Kb) : block<false>(lk, b, ldb, to, ldc, Mb, Nb, Kb);
      }
    }
  }
}

}  // namespace

extern "C" void product_float32(long M, long N, long K, const float *a, long am, long ak, const float *b, long bk,
                                long bn, float *c, long ldc, long add) {
  product(M, N, K, {a, am, ak}, {b, bk, bn}, c, ldc, add);
}
