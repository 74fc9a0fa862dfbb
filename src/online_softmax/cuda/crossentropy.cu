// Cross-entropy of rows that fit in registers: the loss, and the gradient while the row is on chip. One
// read, and one write where the gradient is asked for, which may go over the logits themselves; of
// floats it may be of a 16-bit type, apart from them. Shares lie as in rows.cu.
#include "crossentropy.cuh"

// Blocks of 512 threads that a multiprocessor shall hold: what takes more than 64 registers is alone.
template <int VECTORS, int LANES, int LIES, bool CAPPED, int SMOOTHING>
constexpr int AT_ONCE =
    VECTORS > 8 || (VECTORS == 8 && LIES != WHOLE_WORDS && LANES) || CAPPED || SMOOTHING == WEIGHTED
        ? 1
        : 2;

// The group that has the target's column alone reads the target's logit and writes loss and lse: in
// place, nobody else may still need what it overwrites.
template <typename X, typename DX, int VECTORS, int LANES, int LIES, bool STREAM, bool WRITES,
          bool CAPPED, int SMOOTHING>
__global__ void __launch_bounds__(512, AT_ONCE<VECTORS, LANES, LIES, CAPPED, SMOOTHING>)
    cross_entropy_in_registers(
        const X* x,                // (rows, cols) logits, rows x_row_stride apart
        const int64_t* targets,    // (rows)
        const float* weights,      // (cols), with has_weights
        const float* all_weights,  // their sum, if WEIGHTED
        const float* dloss,        // (rows), dloss_stride apart, if WRITES
        float* loss,               // (rows)
        float* lse,                // (rows)
        float* lse_rest,           // (rows), with has_rest: what rounding takes from lse
        DX* dx,                    // (rows, cols), rows dx_row_stride apart, if WRITES
        int64_t rows, int64_t cols, int64_t x_row_stride, int64_t dx_row_stride,
        int64_t dloss_stride, int64_t ignore_index, int64_t has_weights, int64_t has_rest,
        float scale, float softcap, float hard, float soft, float z_loss) {
  constexpr int GROUP = LANES ? LANES : WARP;
  allow_next_kernel();           // the sum of the losses: it waits before it reads them
  DYNAMIC_SHARED(State, slots);  // an Exchange's
  SHARED_ARRAY(uint64_t, arrived, 2);
  Exchange exchange = {slots, arrived};

  const Place<VECTORS, LANES> at;
  const bool has_row = at.row < rows;  // lanes without one load nothing, and shuffle
  const int64_t row = has_row ? at.row : 0, last = has_row ? cols : 0;
  const X* x_row = x + row * x_row_stride;
  DX* dx_row = dx + row * dx_row_stride;
  using Part = Share<X, VECTORS, GROUP, LIES>;
  Part share;
  const int begin_x = begin_of<LIES>(x_row);
  const auto held =
      share.of(at.first, last, LIES != APART || !WRITES ? begin_x : position_of(dx_row) % Part::N);
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<STREAM>(share, held, x_row, span, at.first, -infinity());
  if constexpr (LANES == 0) exchange.open();  // while the words are on their way
  const Target target(targets, weights, has_weights != 0, row, cols, ignore_index);
  const bool has_target = target.is_among(at.first * Part::N, held.count());
  Asked<X> asked;  // by whoever answers; with smoothing by all, whose terms are relative to it
  if (SMOOTHING != HARD ? target.is_class : has_target) asked.fetch(x_row + target.col);
  const Mix mix = {hard, soft, z_loss, SMOOTHING == WEIGHTED ? all_weights[0] : float(cols)};
  settle_share<false>(share, held, fetched, x_row, span, at.first, -infinity());

  const Logit<CAPPED> logit(scale, softcap);
  float mapped = 0.0f, reference = 0.0f, below = 0.0f;
  if constexpr (SMOOTHING != HARD) {  // before the fold: it replaces floats by terms
    reference = reference_of(logit.map(asked.value(0)));
    below = sum_below<SMOOTHING>(share, held, logit, reference, weights, at.first, cols);
    if (sizeof(X) < 4) forget_floats(share, hidden_zero(rows, {below, below}));
  }
  const Folded folded = fold_logits<WRITES>(share, held, logit);
  State s = folded.s;
  if constexpr (LANES == 0) {
    if (cluster_size() * warp_count() > 1) {
      s = exchange.merge(s, 0);
      if constexpr (SMOOTHING != HARD) below = exchange.add({0.0f, below}, 1).d;
    }
  }
  if constexpr (WRITES) {
    const float unit = weight(folded.s.m, s.m) * folded.shift.back();
    const float prob = is_finite(s.m) ? unit / s.d : not_a_number();
    const float dloss_of_row = has_row ? dloss[row * dloss_stride] : 0.0f;
    const LogitGradient<CAPPED, SMOOTHING> gradient(logit, folded.shift, prob, ::lse(s),
                                                    dloss_of_row, target, mix, weights, cols);
    emit_logits<STREAM, true>(share, held, gradient, target, asked.value(hidden_zero(rows, s)),
                              dx_row, at.first, hidden_zero(rows, s));
  }
  // Last: by now the share holds no registers.
  const bool answers = target.is_class ? has_target : has_row && at.first == 0;
  if (answers && Part::lane() == 0) {
    mapped = logit.map(asked.value(hidden_zero(rows, s)));
    const TwoPartLse parts(s);
    store(loss + row, row_loss<SMOOTHING>(s, logit, target, mapped, reference, below, mix));
    store(lse + row, parts.value);
    if (has_rest) store(lse_rest + row, parts.rest);
  }
}
