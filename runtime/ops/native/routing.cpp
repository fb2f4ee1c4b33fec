// The router: choosing experts, sorting a row per choice by expert, and adding up each token's rows again.
//
// T tokens with K choices each make S = T·K rows; row j holds choice order[j] = t·K + k.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "norm.h"

namespace {

constexpr float TINY = 1e-20f;  // as in runtime/ops/routing.py

// NaN ranks above all numbers.
INLINE bool above(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Gate weights from the scores of chosen experts: divided by their sum if `normalize`, times `scale`.
void weigh(long K, bool normalize, float scale, const float *score, const int64_t *expert, float *gate) {
  float total = TINY;
  for (long k = 0; k < K; k++) {
    gate[k] = score[expert[k]];
    if (normalize) total += gate[k];
  }
  for (long k = 0; k < K; k++) gate[k] = (normalize ? gate[k] / total : gate[k]) * scale;
}

// The best `num` indices of those offered, in descending order; of equals, the one that was offered first.
class Best {
  int64_t *index;
  std::vector<float> values;
  long num, found = 0;

 public:
  explicit Best(long num) : index(nullptr), values(num), num(num) {}
  void start(int64_t *to) { index = to, found = 0; }
  void offer(float value, long i) {
    if (found == num && !above(value, values[num - 1])) return;
    long at = found < num ? found++ : num - 1;
    for (; at > 0 && above(value, values[at - 1]); at--) values[at] = values[at - 1], index[at] = index[at - 1];
    values[at] = value, index[at] = i;
  }
};

// The row of each choice, by token: choice order[j] is in row j.
template <class T> std::vector<const T *> by_choice(const T *rows, long D, const int64_t *order, long S) {
  std::vector<const T *> row(S);
  for (long j = 0; j < S; j++) row[order[j]] = rows + j * D;
  return row;
}

// y = ((a + b) + Σ rows) + c, each sum rounded; a, b and c may be null. Without rows, K is 0.
template <class T>
INLINE void add_up(long D, long K, const T *const *row, const T *a, const T *b, const T *c, T *y) {
  each(D, [&](long i, long n) {
    V sum = {};
    bool first = true;
    const auto add = [&](V v) { sum = first ? v : rounded<T>(sum + v), first = false; };
    if (a) add(get(a + i, n));
    if (b) add(get(b + i, n));
    V of_rows = {};
    for (long k = 0; k < K; k++) of_rows += get(row[k] + i, n);
    if (K) add(rounded<T>(of_rows));
    if (c) add(get(c + i, n));
    set(y + i, sum, n);
  });
}

template <class T>
void unpermute(long R, long D, long K, const T *rows, const int64_t *order, const T *a, const T *b, const T *c, T *y) {
  const auto row = by_choice(rows, D, order, R * K);
  const auto at = [&](const T *x, long r) { return x ? x + r * D : nullptr; };
  for (long r = 0; r < R; r++) add_up(D, K, row.data() + r * K, at(a, r), at(b, r), at(c, r), y + r * D);
}

// As `unpermute`, then the gradient of an RMSNorm whose result has the gradient y: dx, plus `add`.
template <class T>
void permuted_rmsnorm_dgrad(long R, long D, long K, const T *rows, const int64_t *order, const T *a, const T *c,
                            const T *x, long stride, const T *w, const float *rstd, const T *add, T *dy, T *dx) {
  const auto row = by_choice(rows, D, order, R * K);
  for (long r = 0; r < R; r++, a += D, dy += D, x += stride, add += D, dx += D) {
    add_up<T>(D, K, row.data() + r * K, a, nullptr, c ? c + r * D : nullptr, dy);
    rmsnorm_dgrad_row(D, dy, x, w, rstd[r], add, dx);
  }
}

// The sum in FP32 of the X rows of each of P copies, in their order, rounded once. `copy`: that of each row.
template <class T> void sums(long X, long P, long D, const T *rows, const int64_t *copy, T *y) {
  std::vector<float> total(P * D);
  for (long x = 0; x < X; x++, rows += D) {
    float *to = total.data() + copy[x] * D;
    each(D, [&](long i, long n) { set(to + i, get(to + i, n) + get(rows + i, n), n); });
  }
  each(P * D, [&](long i, long n) { set(y + i, get(total.data() + i, n), n); });
}

// rows[j] = x[order[j] / K], rows of `bytes` bytes.
void take_rows(long S, long K, long bytes, const char *x, const int64_t *order, char *rows) {
  for (long j = 0; j < S; j++) memcpy(rows + j * bytes, x + order[j] / K * bytes, bytes);
}

}  // namespace

// The sigmoid of each logit, or the softmax of each row.
extern "C" void scores_float32(long R, long E, long softmax, const float *logits, float *score) {
  for (long r = 0; r < R; r++, logits += E, score += E) {
    const float top = softmax ? *std::max_element(logits, logits + E) : 0;
    V total = {};
    each(E, [&](long i, long n) {
      V v = softmax ? exp(get(logits + i, n) - top) : sigmoid(get(logits + i, n));
      for (long j = n; j < W; j++) v[j] = 0;
      total += v, set(score + i, v, n);
    });
    const float part = softmax ? 1 / sum(total) : 1;
    for (long e = 0; e < E; e++) score[e] *= part;
  }
}

// The row after the last of each expert.
extern "C" void ends_float32(long E, const int64_t *counts, int *ends) {
  for (long e = 0, end = 0; e < E; e++) ends[e] = int(end += counts[e]);
}

extern "C" void choose_float32(long R, long E, long K, long groups, long top_groups, long counted, long normalize,
                               float scale, const float *score, const float *bias, float *gate, int64_t *expert) {
  const long M = E / groups;
  std::vector<float> choice(E);
  std::vector<int64_t> kept(top_groups), two(2);
  std::vector<char> keeps(groups, 1);
  Best experts(K), of_groups(top_groups), of_group(std::min(counted, M));
  for (long r = 0; r < R; r++, score += E, gate += K, expert += K) {
    for (long e = 0; e < E; e++) choice[e] = bias ? score[e] + bias[e] : score[e];
    if (top_groups < groups) {
      of_groups.start(kept.data());
      for (long g = 0; g < groups; g++) {
        of_group.start(two.data());
        for (long e = g * M; e < (g + 1) * M; e++) of_group.offer(choice[e], e);
        of_groups.offer(counted == 1 || M == 1 ? choice[two[0]] : choice[two[0]] + choice[two[1]], g);
      }
      std::fill(keeps.begin(), keeps.end(), 0);
      for (long g : kept) keeps[g] = 1;
    }
    experts.start(expert);
    for (long g = 0; g < groups; g++)
      if (keeps[g])
        for (long e = g * M; e < (g + 1) * M; e++) experts.offer(choice[e], e);
    weigh(K, normalize, scale, score, expert, gate);
  }
}

extern "C" void weigh_float32(long R, long E, long K, long normalize, float scale, const float *score,
                              const int64_t *expert, float *gate) {
  for (long r = 0; r < R; r++) weigh(K, normalize, scale, score + r * E, expert + r * K, gate + r * K);
}

// The gradient of the scores from that of the gate weights; of the logits if scores are their sigmoid (1) or softmax (2).
extern "C" void weigh_dgrad_float32(long R, long E, long K, long normalize, float scale, long of_logits,
                                    const float *dgate, const float *score, const int64_t *expert, float *dx) {
  std::vector<float> d(K), s(K);
  for (long r = 0; r < R; r++, dgate += K, score += E, expert += K, dx += E) {
    float total = TINY, mean = 0, dot = 0;
    for (long k = 0; k < K; k++) {
      s[k] = score[expert[k]];
      d[k] = dgate[k] * scale, total += s[k], mean += d[k] * s[k];
    }
    for (long k = 0; k < K; k++) {
      if (normalize) d[k] = (d[k] - mean / total) / total;
      if (of_logits) d[k] *= s[k];
      if (of_logits == 1) d[k] *= 1 - s[k];
      dot += d[k];
    }
    for (long e = 0; e < E; e++) dx[e] = of_logits == 2 ? score[e] * -dot : 0;
    for (long k = 0; k < K; k++) dx[expert[k]] += d[k];
  }
}

// Sort choices stably by place, and take the row and the gate weight of each. `counts` has the rows of each place.
extern "C" void permute_float32(long S, long K, long places, long bytes, const int64_t *place, const char *x,
                                const float *gate, char *rows, float *gates, int64_t *order, int64_t *counts) {
  std::vector<int64_t> next(places);
  std::fill_n(counts, places, 0);
  for (long j = 0; j < S; j++) counts[place[j]]++;
  for (long p = 1; p < places; p++) next[p] = next[p - 1] + counts[p - 1];
  for (long j = 0; j < S; j++) order[next[place[j]]++] = j;
  for (long j = 0; j < S; j++) gates[j] = gate[order[j]];
  take_rows(S, K, bytes, x, order, rows);
}

extern "C" void take_rows_float32(long S, long K, long bytes, const char *x, const int64_t *order, char *rows) {
  take_rows(S, K, bytes, x, order, rows);
}

#define ROUTING(T, suffix)                                                                                             \
  extern "C" void sums_##suffix(long X, long P, long D, const T *rows, const int64_t *copy, T *y) {                    \
    sums(X, P, D, rows, copy, y);                                                                                      \
  }                                                                                                                    \
  extern "C" void unpermute_##suffix(long R, long D, long K, const T *rows, const int64_t *order, const T *a,          \
                                     const T *b, const T *c, T *y) {                                                   \
    unpermute(R, D, K, rows, order, a, b, c, y);                                                                       \
  }                                                                                                                    \
  extern "C" void permuted_rmsnorm_dgrad_##suffix(long R, long D, long K, const T *rows, const int64_t *order,         \
                                                  const T *a, const T *c, const T *x, long stride, const T *w,         \
                                                  const float *rstd, const T *add, T *dy, T *dx) {                     \
    permuted_rmsnorm_dgrad(R, D, K, rows, order, a, c, x, stride, w, rstd, add, dy, dx);                               \
  }
ROUTING(float, float32)
ROUTING(bf16, bfloat16)
