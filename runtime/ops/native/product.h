// Products of FP32 matrices: c = a·b or c += a·b, with M rows, N columns and inner extent K.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "simd.h"

// Memory aligned to a cache line.
class Buffer {
  std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
  long size = 0;

 public:
  Buffer() = default;
  explicit Buffer(long n)
      : memory(static_cast<float *>(std::aligned_alloc(64, (4 * n + 63) / 64 * 64)), &std::free), size(n) {
    if (n && !memory) throw std::bad_alloc();  // not caught: the process ends with the message
  }
  void zero() { std::fill_n(data(), size, 0.0f); }
  float *data() const { return memory.get(); }
  float &operator[](long i) { return data()[i]; }
};

// a(m, k) = a[m·am + k·ak], so that a may be transposed.
struct Left {
  const float *a;
  long am, ak;
  Left at(long m, long k) const { return {a + m * am + k * ak, am, ak}; }
};

// Memory that a product reads next, to be prefetched line by line: a tile prefetches a line now and then, so that the
// data arrives while it multiplies. `then` comes after it.
class Soon {
  const char *line = nullptr, *end = nullptr;
  long bytes = 0, stride = 0, rows = 0;
  Soon *then = nullptr;

 public:
  Soon() = default;
  // `rows` rows of n elements, `stride` elements apart.
  template <class T>
  Soon(const T *x, long n, long stride, long rows, Soon *then = nullptr)
      : line(reinterpret_cast<const char *>(x)), end(line + sizeof(T) * n), bytes(sizeof(T) * n),
        stride(sizeof(T) * stride), rows(rows), then(then) {}
  // The first of itself and those after it that was not prefetched yet; a tile chooses once, because asking is frequent.
  Soon *current() {
    Soon *soon = this;
    while (soon->rows <= 0 && soon->then) soon = soon->then;
    return soon;
  }
  __attribute__((always_inline)) void ask() {
    if (rows <= 0) return;
    prefetch(line);
    line += LINE;
    if (line >= end) line = end - bytes + stride, end += stride, rows--;
  }
};

constexpr int OFTEN = 2;  // steps of the inner dimension per prefetched line

// Call f(expert, first row, rows) for each expert with rows. `offsets` has the row after the last one of each.
template <class F> void each_group(long E, const int *offsets, F f) {
  for (long e = 0, start = 0; e < E; start = offsets[e++])
    if (offsets[e] > start) f(e, start, offsets[e] - start);
}

// A tile of R rows and U vectors, in registers.
template <int R, int U, bool ADD>
INLINE void tile(Left l, const float *b, long ldb, float *c, long ldc, long K, Soon *soon) {
  V acc[R][U];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) acc[r][u] = V{};
  const auto step = [&](long k) {
    V right[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) right[u] = load(b + k * ldb + u * W);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      const V left = all(l.a[r * l.am + k * l.ak]);
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) acc[r][u] += left * right[u];
    }
  };
  long k = 0;
  if (soon) {
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) prefetch_to_write(c + r * ldc + u * W);
    for (; k + W <= K; k += W) {
      if (l.ak == 1)  // prefetch the next rows
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) prefetch(l.a + (R + r) * l.am + k);
      for (long i = 0; i < W; i += OFTEN) {
        soon->ask();
#pragma GCC unroll 2
        for (int j = 0; j < OFTEN; j++) step(k + i + j);
      }
    }
  }
  for (; k < K; k++) step(k);
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
      float *to = c + r * ldc + u * W;
      store(to, ADD ? load(to) + acc[r][u] : acc[r][u]);
    }
}

// All rows of U vectors: R rows at a time, then fewer.
template <int R, int U, bool ADD>
INLINE void rows(Left l, const float *b, long ldb, float *c, long ldc, long M, long K, Soon *soon) {
  for (; M >= R; M -= R, l.a += R * l.am, c += R * ldc) tile<R, U, ADD>(l, b, ldb, c, ldc, K, soon);
  if constexpr (R > 1) {
    if (M) rows<(R + 1) / 2, U, ADD>(l, b, ldb, c, ldc, M, K, soon);
  }
}

// Accumulators, the vectors of b and one vector of a fill the registers: 32 with AVX-512, 16 with AVX2.
constexpr int REGISTERS = W == 16 ? 24 : 12;
constexpr int WIDE = W == 16 ? 4 : 2;  // vectors of a panel

// A product of matrices in the cache, or prefetched by `soon`. b and c are row-major; N is a multiple of W.
template <bool ADD>
static void small_product(Left l, const float *b, long ldb, float *c, long ldc, long M, long N, long K,
                          Soon *soon = nullptr) {
  long n = 0;
  for (; N - n >= WIDE * W; n += WIDE * W) rows<REGISTERS / WIDE, WIDE, ADD>(l, b + n, ldb, c + n, ldc, M, K, soon);
  if constexpr (WIDE > 3)
    for (; N - n >= 3 * W; n += 3 * W) rows<REGISTERS / 3, 3, ADD>(l, b + n, ldb, c + n, ldc, M, K, soon);
  if constexpr (WIDE > 2)
    for (; N - n >= 2 * W; n += 2 * W) rows<REGISTERS / 2, 2, ADD>(l, b + n, ldb, c + n, ldc, M, K, soon);
  for (; n < N; n += W) rows<REGISTERS / 2, 1, ADD>(l, b + n, ldb, c + n, ldc, M, K, soon);
}

// xt[c, r] = x[r, c] for R rows and C columns, in squares of W × W. The next rows are prefetched.
static void transpose(const float *x, long ldx, long R, long C, float *xt, long ldt) {
  for (long r = 0; r < R; r += W)
    for (long c = 0; c < C; c += W) {
      const float *from = x + r * ldx + c;
      for (long i = 0; i < W && r + i < R; i++) prefetch(from + (W + i) * ldx);
      float *to = xt + c * ldt + r;
      if (r + W <= R && c + W <= C) {
        V v[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) v[i] = load(from + i * ldx);
#pragma GCC unroll 4
        for (int s = 1; s < W; s *= 2) {  // swap squares of s × s off the diagonal
          VI low, high;
          for (int i = 0; i < W; i++) low[i] = i & s ? W + i - s : i, high[i] = i & s ? W + i : i + s;
#pragma GCC unroll 16
          for (int i = 0; i < W; i++)
            if (!(i & s)) {
              const V a = v[i], b = v[i + s];
              v[i] = __builtin_shuffle(a, b, low), v[i + s] = __builtin_shuffle(a, b, high);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(to + i * ldt, v[i]);
      } else {
        for (long i = 0; i < W && r + i < R; i++)
          for (long j = 0; j < W && c + j < C; j++) to[j * ldt + i] = from[i * ldx + j];
      }
    }
}
