// The gradients of softmax.h from the log-sum-exps, each score computed once more: Dao et al. 2022, arXiv:2205.14135,
// algorithm 4. With P the weights, L the log-sum-exp of a row and do, dL the gradients that come in,
//
//     dv = P^T do        dS = P (do v^T - less), less = do . o - dL        dq = scale dS k        dk = scale dS^T q
#pragma once
#include "softmax.h"

namespace lintra {
namespace LINTRA_ISA {

template <class T>
struct BackwardTile {
  static constexpr i64 W = kLanes<T>;
  i64 d, e, d_step, e_step;
  T *q, *q_t;    // [kTile][d_step], scaled; [d_step][kTile]
  T *dO, *dO_t;  // [kTile][e_step]; [e_step][kTile]
  T *scores, *dscores;  // [kTile][kTile]
  T *dq;                // [kTile][d_step], to be scaled
  T *logsumexp, *less;  // [kTile]
  bool nonfinite_q, nonfinite_dO;  // not all finite

  template <class F>
  void attend(const Sight& x, const T* keys, const T* values, bool nonfinite_keys, T* dk, T* dv, Ahead* ahead, F&& make_seen) {
    multiply_scores(x, keys, d_step, q_t, d, scores, ahead);
    multiply_scores(x, values, e_step, dO_t, e, dscores, ahead);
    for (i64 i = 0; i < x.rows; i += W) softmax_weights(x, i, make_seen(i));
    add_to_keys<T>(x, {scores, kTile, dO, e_step, dv, e_step, nullptr}, e_step, nonfinite_dO);
    add_to_keys<T>(x, {dscores, kTile, q, d_step, dk, d_step, nullptr}, d_step, nonfinite_q);
    add_to_rows<T>(x, {dscores, kTile, keys, d_step, dq, d_step, nullptr}, d_step, nonfinite_keys);
  }

  // Scores -> weights; gradients of weights -> of scores.
  template <class Seen>
  void softmax_weights(const Sight& x, i64 first, const Seen& seen) {
    T *column = scores + first, *dcolumn = dscores + first;
    const Vec<T> base = load(logsumexp + first), subtracted = load(less + first);
    each_seen(x, first, dcolumn, [&](i64) {});
    each_seen(x, first, column, [&](i64 j) {
      T *score = column + j * kTile, *dscore = dcolumn + j * kTile;
      Vec<T> weight = exp_below<T>(load(score) - base);
      if constexpr (Seen::kShared) {
        if (seen.rule.rounds > 1) weight *= seen.share(j);
      }
      Vec<T> dweight = (load(dscore) - subtracted) * weight;
      if constexpr (Seen::kMasked) {
        const Mask<T> mask = x.hidden && x.hidden[j] ? Mask<T>{} : seen(j);
        weight = select<T>(mask, weight, Vec<T>{});
        dweight = select<T>(mask, dweight, Vec<T>{});
      }
      store(score, weight);
      store(dscore, dweight);
    });
  }
};

}  // namespace LINTRA_ISA
}  // namespace lintra
