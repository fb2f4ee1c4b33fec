"""Bodies of pipeline rank 0, constructed by dsc: what each action does, in order.

c: the executor · p: parameters · g: gradient accumulators · v, w: values of one stage and micro-batch
"""

from ..segments import attention_T256_D192_42a366
from ..segments import dense_T256_D192_2fae2c
from ..segments import embed_T256_552fd3
from ..segments import experts_D192_E8_8204a1
from ..segments import final_norm_T256_D192_1e877b
from ..segments import final_norm_T256_D192_34219e
from ..segments import head_T256_D192_9c7d09
from ..segments import join_T256_D192_ff91c3
from ..segments import mtp_input_T256_D192_71ab2b
from ..segments import router_T256_D192_357fe5
from ..segments import router_T256_D192_4377cb
from ..segments import shared_T256_D192_bd4458


def B1(c, p, g, a):
    v = c.values(1, a)
    v.d_mtp_loss = c.constant('mtp')
    v.d_M0_final_h, v.M0_head_d_linear_0 = head_T256_D192_9c7d09.I(
        p.head, v.mtp_targets, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse, v.d_mtp_loss
    )
    del v.mtp_targets, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse, v.d_mtp_loss
    final_norm_T256_D192_34219e.W(g.mtp_0_final_norm, v.M0_h, v.M0_final_norm_rmsnorm_0_rstd, v.d_M0_final_h)
    head_T256_D192_9c7d09.W(g.head, v.M0_final_h, v.M0_head_d_linear_0)
    del v.M0_final_h, v.M0_head_d_linear_0
    v.d_M0_h = final_norm_T256_D192_34219e.I(p.mtp_0_final_norm, v.M0_h, v.M0_final_norm_rmsnorm_0_rstd, v.d_M0_final_h)
    del v.M0_h, v.M0_final_norm_rmsnorm_0_rstd, v.d_M0_final_h
    v.d_M0_residual, v.d_M0_shared, v.d_M0_returned_rows = join_T256_D192_ff91c3.I(v.M0_order, v.d_M0_h)
    del v.d_M0_h
    c.combine('I1', a, 'M0', v.d_M0_returned_rows, v.M0_route)
    v.d_loss = c.constant('loss')
    v.d_final_h, v.head_d_linear_0 = head_T256_D192_9c7d09.I(
        p.head, v.targets, v.head_linear_0, v.head_cross_entropy_0_lse, v.d_loss
    )
    del v.targets, v.head_linear_0, v.head_cross_entropy_0_lse, v.d_loss
    head_T256_D192_9c7d09.W(g.head, v.final_h, v.head_d_linear_0)
    del v.final_h, v.head_d_linear_0
    v.d_M0_expert_rows = c.wait_combine('I1', a, 'M0')
    del v.d_M0_returned_rows
    v.d_M0_received_rows, v.d_M0_received_gate, v.M0_experts_d_grouped_linear_0 = experts_D192_E8_8204a1.I(
        p.mtp_0_ffn_experts_up, p.mtp_0_ffn_experts_down, v.M0_received_gate, v.M0_offsets,
        v.M0_experts_grouped_linear_0, v.d_M0_expert_rows
    )
    del v.M0_received_gate, v.M0_experts_grouped_linear_0
    c.dispatch('I1', a, 'M0', v.d_M0_received_rows, v.d_M0_received_gate, v.M0_route)
    experts_D192_E8_8204a1.W(
        g.mtp_0_ffn_experts_up, g.mtp_0_ffn_experts_down, v.M0_received_rows, v.M0_offsets, v.M0_experts_gated_swiglu_0,
        v.d_M0_expert_rows, v.M0_experts_d_grouped_linear_0
    )
    del (
        v.M0_received_rows, v.M0_offsets, v.M0_experts_gated_swiglu_0, v.d_M0_expert_rows,
        v.M0_experts_d_grouped_linear_0
    )
    v.d_M0_x, v.M0_shared_d_linear_0 = shared_T256_D192_bd4458.I(
        p.mtp_0_ffn_shared_up, p.mtp_0_ffn_shared_down, v.M0_shared_linear_0, v.d_M0_shared
    )
    del v.M0_shared_linear_0
    shared_T256_D192_bd4458.W(
        g.mtp_0_ffn_shared_up, g.mtp_0_ffn_shared_down, v.M0_x, v.M0_shared_swiglu_0, v.d_M0_shared,
        v.M0_shared_d_linear_0
    )
    del v.M0_shared_swiglu_0, v.d_M0_shared, v.M0_shared_d_linear_0
    v.d_M0_rows, v.d_M0_gate = c.wait_dispatch('I1', a, 'M0')
    del v.d_M0_received_rows, v.d_M0_received_gate, v.M0_route
    v.d_M0_entered, v.d_M0_attended, v.M0_router_d_linear_wide_0, v.M0_router_d_rmsnorm_0 = router_T256_D192_357fe5.I(
        p.mtp_0_ffn_norm, p.mtp_0_ffn_router_weight, v.M0_residual, v.M0_order, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_linear_wide_0, v.M0_router_route_0_expert, v.d_M0_residual, v.d_M0_x, v.d_M0_rows, v.d_M0_gate
    )
    del (
        v.M0_order, v.M0_router_linear_wide_0, v.M0_router_route_0_expert, v.d_M0_residual, v.d_M0_x, v.d_M0_rows,
        v.d_M0_gate
    )
    router_T256_D192_357fe5.W(
        g.mtp_0_ffn_norm, g.mtp_0_ffn_router_weight, v.M0_residual, v.M0_x, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_d_linear_wide_0, v.M0_router_d_rmsnorm_0
    )
    del v.M0_residual, v.M0_x, v.M0_router_rmsnorm_0_rstd, v.M0_router_d_linear_wide_0, v.M0_router_d_rmsnorm_0
    (
        v.d_M0_input, v.M0_attention_d_linear_1, v.M0_attention_d_linear_3, v.M0_attention_d_rmsnorm_2,
        v.M0_attention_d_linear_2, v.M0_attention_d_rmsnorm_1, v.M0_attention_d_linear_0, v.M0_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.mtp_0_attention_norm, p.mtp_0_attention_q_down, p.mtp_0_attention_q_norm, p.mtp_0_attention_q_up,
        p.mtp_0_attention_kv_down, p.mtp_0_attention_kv_norm, p.mtp_0_attention_kv_up, p.mtp_0_attention_out,
        v.M0_input, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0, v.M0_attention_rmsnorm_1_rstd,
        v.M0_attention_linear_1, v.M0_attention_linear_2, v.M0_attention_rmsnorm_2_rstd, v.M0_attention_linear_3,
        v.M0_attention_mla_attention_0, v.M0_attention_mla_attention_0_lse, v.d_M0_entered, v.d_M0_attended
    )
    del v.M0_attention_linear_1, v.M0_attention_linear_3, v.M0_attention_mla_attention_0_lse, v.d_M0_entered
    attention_T256_D192_42a366.W(
        g.mtp_0_attention_norm, g.mtp_0_attention_q_down, g.mtp_0_attention_q_norm, g.mtp_0_attention_q_up,
        g.mtp_0_attention_kv_down, g.mtp_0_attention_kv_norm, g.mtp_0_attention_kv_up, g.mtp_0_attention_out,
        v.M0_input, v.M0_attention_rmsnorm_0, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0,
        v.M0_attention_rmsnorm_1, v.M0_attention_rmsnorm_1_rstd, v.M0_attention_linear_2, v.M0_attention_rmsnorm_2,
        v.M0_attention_rmsnorm_2_rstd, v.M0_attention_mla_attention_0, v.d_M0_attended, v.M0_attention_d_linear_1,
        v.M0_attention_d_linear_3, v.M0_attention_d_rmsnorm_2, v.M0_attention_d_linear_2, v.M0_attention_d_rmsnorm_1,
        v.M0_attention_d_linear_0, v.M0_attention_d_rmsnorm_0
    )
    del (
        v.M0_input, v.M0_attention_rmsnorm_0, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0,
        v.M0_attention_rmsnorm_1, v.M0_attention_rmsnorm_1_rstd, v.M0_attention_linear_2, v.M0_attention_rmsnorm_2,
        v.M0_attention_rmsnorm_2_rstd, v.M0_attention_mla_attention_0, v.d_M0_attended, v.M0_attention_d_linear_1,
        v.M0_attention_d_linear_3, v.M0_attention_d_rmsnorm_2, v.M0_attention_d_linear_2, v.M0_attention_d_rmsnorm_1,
        v.M0_attention_d_linear_0, v.M0_attention_d_rmsnorm_0
    )
    v.d_final_h_mtp, v.M0_input_d_cat2_0, v.M0_input_d_embedding_0 = mtp_input_T256_D192_71ab2b.I(
        p.mtp_0_embedding_norm, p.mtp_0_hidden_norm, p.mtp_0_projection, v.final_h_mtp, v.M0_input_embedding_0,
        v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.d_M0_input
    )
    mtp_input_T256_D192_71ab2b.W(
        g.embedding, g.mtp_0_embedding_norm, g.mtp_0_hidden_norm, g.mtp_0_projection, v.mtp_tokens, v.final_h_mtp,
        v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.M0_input_cat2_0, v.d_M0_input,
        v.M0_input_d_cat2_0, v.M0_input_d_embedding_0
    )
    del (
        v.mtp_tokens, v.final_h_mtp, v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd,
        v.M0_input_cat2_0, v.d_M0_input, v.M0_input_d_cat2_0, v.M0_input_d_embedding_0
    )
    v.d_L3_h, v.final_norm_d_rmsnorm_0 = final_norm_T256_D192_1e877b.I(
        p.final_norm, v.L3_h, v.final_norm_rmsnorm_0_rstd, v.d_final_h, v.d_final_h_mtp
    )
    del v.d_final_h, v.d_final_h_mtp
    c.send(1, 'B1', a, v.d_L3_h)
    del v.d_L3_h
    final_norm_T256_D192_1e877b.W(g.final_norm, v.L3_h, v.final_norm_rmsnorm_0_rstd, v.final_norm_d_rmsnorm_0)
    del v.L3_h, v.final_norm_rmsnorm_0_rstd, v.final_norm_d_rmsnorm_0


def E0(c, p, g, a):
    v = c.values(0, a)
    v.tokens = c.load('tokens', a)
    v.embed_h = embed_T256_552fd3.F(p.embedding, v.tokens)
    del v.tokens
    (
        v.L0_entered, v.L0_attended, v.L0_attention_rmsnorm_0, v.L0_attention_rmsnorm_0_rstd, v.L0_attention_linear_0,
        v.L0_attention_rmsnorm_1, v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_1, v.L0_attention_linear_2,
        v.L0_attention_rmsnorm_2, v.L0_attention_rmsnorm_2_rstd, v.L0_attention_linear_3,
        v.L0_attention_mla_attention_0, v.L0_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_0_attention_norm, p.layers_0_attention_q_down, p.layers_0_attention_q_norm, p.layers_0_attention_q_up,
        p.layers_0_attention_kv_down, p.layers_0_attention_kv_norm, p.layers_0_attention_kv_up,
        p.layers_0_attention_out, v.embed_h
    )
    del (
        v.embed_h, v.L0_attention_rmsnorm_0, v.L0_attention_rmsnorm_0_rstd, v.L0_attention_linear_0,
        v.L0_attention_rmsnorm_1, v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_1, v.L0_attention_linear_2,
        v.L0_attention_rmsnorm_2, v.L0_attention_rmsnorm_2_rstd, v.L0_attention_linear_3,
        v.L0_attention_mla_attention_0, v.L0_attention_mla_attention_0_lse
    )
    (
        v.L0_h, v.L0_dense_add_0, v.L0_dense_rmsnorm_0, v.L0_dense_rmsnorm_0_rstd, v.L0_dense_linear_0,
        v.L0_dense_swiglu_0
    ) = dense_T256_D192_2fae2c.F(
        p.layers_0_ffn_norm, p.layers_0_ffn_up, p.layers_0_ffn_down, v.L0_entered, v.L0_attended
    )
    del (
        v.L0_entered, v.L0_attended, v.L0_dense_add_0, v.L0_dense_rmsnorm_0, v.L0_dense_rmsnorm_0_rstd,
        v.L0_dense_linear_0, v.L0_dense_swiglu_0
    )
    (
        v.L1_entered, v.L1_attended, v.L1_attention_rmsnorm_0, v.L1_attention_rmsnorm_0_rstd, v.L1_attention_linear_0,
        v.L1_attention_rmsnorm_1, v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_1, v.L1_attention_linear_2,
        v.L1_attention_rmsnorm_2, v.L1_attention_rmsnorm_2_rstd, v.L1_attention_linear_3,
        v.L1_attention_mla_attention_0, v.L1_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_1_attention_norm, p.layers_1_attention_q_down, p.layers_1_attention_q_norm, p.layers_1_attention_q_up,
        p.layers_1_attention_kv_down, p.layers_1_attention_kv_norm, p.layers_1_attention_kv_up,
        p.layers_1_attention_out, v.L0_h
    )
    del (
        v.L0_h, v.L1_attention_rmsnorm_0, v.L1_attention_rmsnorm_0_rstd, v.L1_attention_linear_0,
        v.L1_attention_rmsnorm_1, v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_1, v.L1_attention_linear_2,
        v.L1_attention_rmsnorm_2, v.L1_attention_rmsnorm_2_rstd, v.L1_attention_linear_3,
        v.L1_attention_mla_attention_0, v.L1_attention_mla_attention_0_lse
    )
    (
        v.L1_residual, v.L1_x, v.L1_rows, v.L1_gate, v.L1_order, v.L1_counts, v.L1_sequence_loss,
        v.L1_router_rmsnorm_0_rstd, v.L1_router_linear_wide_0, v.L1_router_route_0_expert
    ) = router_T256_D192_4377cb.F(
        p.layers_1_ffn_norm, p.layers_1_ffn_router_weight, p.layers_1_ffn_router_bias, v.L1_entered, v.L1_attended
    )
    del v.L1_entered, v.L1_attended, v.L1_router_rmsnorm_0_rstd, v.L1_router_linear_wide_0, v.L1_router_route_0_expert
    c.record('load layers.1', v.L1_counts)
    c.record('sequence_loss L1', v.L1_sequence_loss)
    del v.L1_sequence_loss
    c.counts('F0', a, 'L1', v.L1_counts)
    v.L1_route, v.L1_offsets = c.wait_counts('F0', a, 'L1')
    del v.L1_counts
    c.dispatch('F0', a, 'L1', v.L1_rows, v.L1_gate, v.L1_route)
    v.L1_shared, v.L1_shared_linear_0, v.L1_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.layers_1_ffn_shared_up, p.layers_1_ffn_shared_down, v.L1_x
    )
    del v.L1_x, v.L1_shared_linear_0, v.L1_shared_swiglu_0
    v.L1_received_rows, v.L1_received_gate = c.wait_dispatch('F0', a, 'L1')
    del v.L1_rows, v.L1_gate
    v.L1_expert_rows, v.L1_experts_grouped_linear_0, v.L1_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.layers_1_ffn_experts_up, p.layers_1_ffn_experts_down, v.L1_received_rows, v.L1_received_gate, v.L1_offsets
    )
    del v.L1_received_rows, v.L1_received_gate, v.L1_offsets, v.L1_experts_grouped_linear_0, v.L1_experts_gated_swiglu_0
    c.combine('F0', a, 'L1', v.L1_expert_rows, v.L1_route)
    v.L1_returned_rows = c.wait_combine('F0', a, 'L1')
    del v.L1_expert_rows, v.L1_route
    v.L1_h = join_T256_D192_ff91c3.F(v.L1_residual, v.L1_shared, v.L1_returned_rows, v.L1_order)
    del v.L1_residual, v.L1_shared, v.L1_returned_rows, v.L1_order
    (
        v.L2_entered, v.L2_attended, v.L2_attention_rmsnorm_0, v.L2_attention_rmsnorm_0_rstd, v.L2_attention_linear_0,
        v.L2_attention_rmsnorm_1, v.L2_attention_rmsnorm_1_rstd, v.L2_attention_linear_1, v.L2_attention_linear_2,
        v.L2_attention_rmsnorm_2, v.L2_attention_rmsnorm_2_rstd, v.L2_attention_linear_3,
        v.L2_attention_mla_attention_0, v.L2_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_2_attention_norm, p.layers_2_attention_q_down, p.layers_2_attention_q_norm, p.layers_2_attention_q_up,
        p.layers_2_attention_kv_down, p.layers_2_attention_kv_norm, p.layers_2_attention_kv_up,
        p.layers_2_attention_out, v.L1_h
    )
    del (
        v.L1_h, v.L2_attention_rmsnorm_0, v.L2_attention_rmsnorm_0_rstd, v.L2_attention_linear_0,
        v.L2_attention_rmsnorm_1, v.L2_attention_rmsnorm_1_rstd, v.L2_attention_linear_1, v.L2_attention_linear_2,
        v.L2_attention_rmsnorm_2, v.L2_attention_rmsnorm_2_rstd, v.L2_attention_linear_3,
        v.L2_attention_mla_attention_0, v.L2_attention_mla_attention_0_lse
    )
    (
        v.L2_residual, v.L2_x, v.L2_rows, v.L2_gate, v.L2_order, v.L2_counts, v.L2_sequence_loss,
        v.L2_router_rmsnorm_0_rstd, v.L2_router_linear_wide_0, v.L2_router_route_0_expert
    ) = router_T256_D192_4377cb.F(
        p.layers_2_ffn_norm, p.layers_2_ffn_router_weight, p.layers_2_ffn_router_bias, v.L2_entered, v.L2_attended
    )
    del v.L2_entered, v.L2_attended, v.L2_router_rmsnorm_0_rstd, v.L2_router_linear_wide_0, v.L2_router_route_0_expert
    c.record('load layers.2', v.L2_counts)
    c.record('sequence_loss L2', v.L2_sequence_loss)
    del v.L2_sequence_loss
    c.counts('F0', a, 'L2', v.L2_counts)
    v.L2_route, v.L2_offsets = c.wait_counts('F0', a, 'L2')
    del v.L2_counts
    c.dispatch('F0', a, 'L2', v.L2_rows, v.L2_gate, v.L2_route)
    v.L2_shared, v.L2_shared_linear_0, v.L2_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.layers_2_ffn_shared_up, p.layers_2_ffn_shared_down, v.L2_x
    )
    del v.L2_x, v.L2_shared_linear_0, v.L2_shared_swiglu_0
    v.L2_received_rows, v.L2_received_gate = c.wait_dispatch('F0', a, 'L2')
    del v.L2_rows, v.L2_gate
    v.L2_expert_rows, v.L2_experts_grouped_linear_0, v.L2_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.layers_2_ffn_experts_up, p.layers_2_ffn_experts_down, v.L2_received_rows, v.L2_received_gate, v.L2_offsets
    )
    del v.L2_received_rows, v.L2_received_gate, v.L2_offsets, v.L2_experts_grouped_linear_0, v.L2_experts_gated_swiglu_0
    c.combine('F0', a, 'L2', v.L2_expert_rows, v.L2_route)
    v.L2_returned_rows = c.wait_combine('F0', a, 'L2')
    del v.L2_expert_rows, v.L2_route
    v.L2_h = join_T256_D192_ff91c3.F(v.L2_residual, v.L2_shared, v.L2_returned_rows, v.L2_order)
    del v.L2_residual, v.L2_shared, v.L2_returned_rows, v.L2_order
    (
        v.L3_entered, v.L3_attended, v.L3_attention_rmsnorm_0, v.L3_attention_rmsnorm_0_rstd, v.L3_attention_linear_0,
        v.L3_attention_rmsnorm_1, v.L3_attention_rmsnorm_1_rstd, v.L3_attention_linear_1, v.L3_attention_linear_2,
        v.L3_attention_rmsnorm_2, v.L3_attention_rmsnorm_2_rstd, v.L3_attention_linear_3,
        v.L3_attention_mla_attention_0, v.L3_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_3_attention_norm, p.layers_3_attention_q_down, p.layers_3_attention_q_norm, p.layers_3_attention_q_up,
        p.layers_3_attention_kv_down, p.layers_3_attention_kv_norm, p.layers_3_attention_kv_up,
        p.layers_3_attention_out, v.L2_h
    )
    del (
        v.L2_h, v.L3_attention_rmsnorm_0, v.L3_attention_rmsnorm_0_rstd, v.L3_attention_linear_0,
        v.L3_attention_rmsnorm_1, v.L3_attention_rmsnorm_1_rstd, v.L3_attention_linear_1, v.L3_attention_linear_2,
        v.L3_attention_rmsnorm_2, v.L3_attention_rmsnorm_2_rstd, v.L3_attention_linear_3,
        v.L3_attention_mla_attention_0, v.L3_attention_mla_attention_0_lse
    )
    (
        v.L3_residual, v.L3_x, v.L3_rows, v.L3_gate, v.L3_order, v.L3_counts, v.L3_sequence_loss,
        v.L3_router_rmsnorm_0_rstd, v.L3_router_linear_wide_0, v.L3_router_route_0_expert
    ) = router_T256_D192_4377cb.F(
        p.layers_3_ffn_norm, p.layers_3_ffn_router_weight, p.layers_3_ffn_router_bias, v.L3_entered, v.L3_attended
    )
    del v.L3_entered, v.L3_attended, v.L3_router_rmsnorm_0_rstd, v.L3_router_linear_wide_0, v.L3_router_route_0_expert
    c.record('load layers.3', v.L3_counts)
    c.record('sequence_loss L3', v.L3_sequence_loss)
    del v.L3_sequence_loss
    c.counts('F0', a, 'L3', v.L3_counts)
    v.L3_route, v.L3_offsets = c.wait_counts('F0', a, 'L3')
    del v.L3_counts
    c.dispatch('F0', a, 'L3', v.L3_rows, v.L3_gate, v.L3_route)
    v.L3_shared, v.L3_shared_linear_0, v.L3_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.layers_3_ffn_shared_up, p.layers_3_ffn_shared_down, v.L3_x
    )
    del v.L3_x, v.L3_shared_linear_0, v.L3_shared_swiglu_0
    v.L3_received_rows, v.L3_received_gate = c.wait_dispatch('F0', a, 'L3')
    del v.L3_rows, v.L3_gate
    v.L3_expert_rows, v.L3_experts_grouped_linear_0, v.L3_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.layers_3_ffn_experts_up, p.layers_3_ffn_experts_down, v.L3_received_rows, v.L3_received_gate, v.L3_offsets
    )
    del v.L3_received_rows, v.L3_received_gate, v.L3_offsets, v.L3_experts_grouped_linear_0, v.L3_experts_gated_swiglu_0
    c.combine('F0', a, 'L3', v.L3_expert_rows, v.L3_route)
    v.L3_returned_rows = c.wait_combine('F0', a, 'L3')
    del v.L3_expert_rows, v.L3_route
    v.L3_h = join_T256_D192_ff91c3.F(v.L3_residual, v.L3_shared, v.L3_returned_rows, v.L3_order)
    del v.L3_residual, v.L3_shared, v.L3_returned_rows, v.L3_order
    c.send(1, 'F0', a, v.L3_h)
    del v.L3_h


def E1(c, p, g, a):
    v = c.values(1, a)
    v.L3_h = c.receive(1, 'F0', a)
    v.final_h, v.final_h_mtp, v.final_norm_rmsnorm_0_rstd = final_norm_T256_D192_1e877b.F(p.final_norm, v.L3_h)
    del v.L3_h, v.final_norm_rmsnorm_0_rstd
    v.mtp_tokens = c.load('mtp_tokens', a)
    (
        v.M0_input, v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.M0_input_cat2_0
    ) = mtp_input_T256_D192_71ab2b.F(
        p.embedding, p.mtp_0_embedding_norm, p.mtp_0_hidden_norm, p.mtp_0_projection, v.mtp_tokens, v.final_h_mtp
    )
    del (
        v.mtp_tokens, v.final_h_mtp, v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd,
        v.M0_input_cat2_0
    )
    (
        v.M0_entered, v.M0_attended, v.M0_attention_rmsnorm_0, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0,
        v.M0_attention_rmsnorm_1, v.M0_attention_rmsnorm_1_rstd, v.M0_attention_linear_1, v.M0_attention_linear_2,
        v.M0_attention_rmsnorm_2, v.M0_attention_rmsnorm_2_rstd, v.M0_attention_linear_3,
        v.M0_attention_mla_attention_0, v.M0_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.mtp_0_attention_norm, p.mtp_0_attention_q_down, p.mtp_0_attention_q_norm, p.mtp_0_attention_q_up,
        p.mtp_0_attention_kv_down, p.mtp_0_attention_kv_norm, p.mtp_0_attention_kv_up, p.mtp_0_attention_out, v.M0_input
    )
    del (
        v.M0_input, v.M0_attention_rmsnorm_0, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0,
        v.M0_attention_rmsnorm_1, v.M0_attention_rmsnorm_1_rstd, v.M0_attention_linear_1, v.M0_attention_linear_2,
        v.M0_attention_rmsnorm_2, v.M0_attention_rmsnorm_2_rstd, v.M0_attention_linear_3,
        v.M0_attention_mla_attention_0, v.M0_attention_mla_attention_0_lse
    )
    (
        v.M0_residual, v.M0_x, v.M0_rows, v.M0_gate, v.M0_order, v.M0_counts, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_linear_wide_0, v.M0_router_route_0_expert
    ) = router_T256_D192_357fe5.F(
        p.mtp_0_ffn_norm, p.mtp_0_ffn_router_weight, p.mtp_0_ffn_router_bias, v.M0_entered, v.M0_attended
    )
    del v.M0_entered, v.M0_attended, v.M0_router_rmsnorm_0_rstd, v.M0_router_linear_wide_0, v.M0_router_route_0_expert
    c.record('load mtp.0', v.M0_counts)
    c.counts('F1', a, 'M0', v.M0_counts)
    v.M0_route, v.M0_offsets = c.wait_counts('F1', a, 'M0')
    del v.M0_counts
    c.dispatch('F1', a, 'M0', v.M0_rows, v.M0_gate, v.M0_route)
    v.targets = c.load('targets', a)
    v.loss, v.head_linear_0, v.head_cross_entropy_0_lse = head_T256_D192_9c7d09.F(p.head, v.final_h, v.targets)
    del v.final_h, v.targets, v.head_linear_0, v.head_cross_entropy_0_lse
    c.record('loss', v.loss)
    del v.loss
    v.M0_received_rows, v.M0_received_gate = c.wait_dispatch('F1', a, 'M0')
    del v.M0_rows, v.M0_gate
    v.M0_expert_rows, v.M0_experts_grouped_linear_0, v.M0_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.mtp_0_ffn_experts_up, p.mtp_0_ffn_experts_down, v.M0_received_rows, v.M0_received_gate, v.M0_offsets
    )
    del v.M0_received_rows, v.M0_received_gate, v.M0_offsets, v.M0_experts_grouped_linear_0, v.M0_experts_gated_swiglu_0
    c.combine('F1', a, 'M0', v.M0_expert_rows, v.M0_route)
    v.M0_shared, v.M0_shared_linear_0, v.M0_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.mtp_0_ffn_shared_up, p.mtp_0_ffn_shared_down, v.M0_x
    )
    del v.M0_x, v.M0_shared_linear_0, v.M0_shared_swiglu_0
    v.M0_returned_rows = c.wait_combine('F1', a, 'M0')
    del v.M0_expert_rows, v.M0_route
    v.M0_h = join_T256_D192_ff91c3.F(v.M0_residual, v.M0_shared, v.M0_returned_rows, v.M0_order)
    del v.M0_residual, v.M0_shared, v.M0_returned_rows, v.M0_order
    v.M0_final_h, v.M0_final_norm_rmsnorm_0_rstd = final_norm_T256_D192_34219e.F(p.mtp_0_final_norm, v.M0_h)
    del v.M0_h, v.M0_final_norm_rmsnorm_0_rstd
    v.mtp_targets = c.load('mtp_targets', a)
    v.mtp_loss, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse = head_T256_D192_9c7d09.F(
        p.head, v.M0_final_h, v.mtp_targets
    )
    del v.M0_final_h, v.mtp_targets, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse
    c.record('mtp_loss', v.mtp_loss)
    del v.mtp_loss


def F0(c, p, g, a):
    v = c.values(0, a)
    v.tokens = c.load('tokens', a)
    v.embed_h = embed_T256_552fd3.F(p.embedding, v.tokens)
    (
        v.L0_entered, v.L0_attended, v.L0_attention_rmsnorm_0, v.L0_attention_rmsnorm_0_rstd, v.L0_attention_linear_0,
        v.L0_attention_rmsnorm_1, v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_1, v.L0_attention_linear_2,
        v.L0_attention_rmsnorm_2, v.L0_attention_rmsnorm_2_rstd, v.L0_attention_linear_3,
        v.L0_attention_mla_attention_0, v.L0_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_0_attention_norm, p.layers_0_attention_q_down, p.layers_0_attention_q_norm, p.layers_0_attention_q_up,
        p.layers_0_attention_kv_down, p.layers_0_attention_kv_norm, p.layers_0_attention_kv_up,
        p.layers_0_attention_out, v.embed_h
    )
    (
        v.L0_h, v.L0_dense_add_0, v.L0_dense_rmsnorm_0, v.L0_dense_rmsnorm_0_rstd, v.L0_dense_linear_0,
        v.L0_dense_swiglu_0
    ) = dense_T256_D192_2fae2c.F(
        p.layers_0_ffn_norm, p.layers_0_ffn_up, p.layers_0_ffn_down, v.L0_entered, v.L0_attended
    )
    del v.L0_entered, v.L0_attended
    (
        v.L1_entered, v.L1_attended, v.L1_attention_rmsnorm_0, v.L1_attention_rmsnorm_0_rstd, v.L1_attention_linear_0,
        v.L1_attention_rmsnorm_1, v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_1, v.L1_attention_linear_2,
        v.L1_attention_rmsnorm_2, v.L1_attention_rmsnorm_2_rstd, v.L1_attention_linear_3,
        v.L1_attention_mla_attention_0, v.L1_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_1_attention_norm, p.layers_1_attention_q_down, p.layers_1_attention_q_norm, p.layers_1_attention_q_up,
        p.layers_1_attention_kv_down, p.layers_1_attention_kv_norm, p.layers_1_attention_kv_up,
        p.layers_1_attention_out, v.L0_h
    )
    (
        v.L1_residual, v.L1_x, v.L1_rows, v.L1_gate, v.L1_order, v.L1_counts, v.L1_sequence_loss,
        v.L1_router_rmsnorm_0_rstd, v.L1_router_linear_wide_0, v.L1_router_route_0_expert
    ) = router_T256_D192_4377cb.F(
        p.layers_1_ffn_norm, p.layers_1_ffn_router_weight, p.layers_1_ffn_router_bias, v.L1_entered, v.L1_attended
    )
    del v.L1_entered, v.L1_attended
    c.record('load layers.1', v.L1_counts)
    c.record('sequence_loss L1', v.L1_sequence_loss)
    del v.L1_sequence_loss
    c.counts('F0', a, 'L1', v.L1_counts)
    v.L1_route, v.L1_offsets = c.wait_counts('F0', a, 'L1')
    del v.L1_counts
    c.dispatch('F0', a, 'L1', v.L1_rows, v.L1_gate, v.L1_route)
    v.L1_shared, v.L1_shared_linear_0, v.L1_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.layers_1_ffn_shared_up, p.layers_1_ffn_shared_down, v.L1_x
    )
    v.L1_received_rows, v.L1_received_gate = c.wait_dispatch('F0', a, 'L1')
    del v.L1_rows, v.L1_gate
    v.L1_expert_rows, v.L1_experts_grouped_linear_0, v.L1_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.layers_1_ffn_experts_up, p.layers_1_ffn_experts_down, v.L1_received_rows, v.L1_received_gate, v.L1_offsets
    )
    c.combine('F0', a, 'L1', v.L1_expert_rows, v.L1_route)
    v.L1_returned_rows = c.wait_combine('F0', a, 'L1')
    del v.L1_expert_rows
    v.L1_h = join_T256_D192_ff91c3.F(v.L1_residual, v.L1_shared, v.L1_returned_rows, v.L1_order)
    del v.L1_shared, v.L1_returned_rows
    (
        v.L2_entered, v.L2_attended, v.L2_attention_rmsnorm_0, v.L2_attention_rmsnorm_0_rstd, v.L2_attention_linear_0,
        v.L2_attention_rmsnorm_1, v.L2_attention_rmsnorm_1_rstd, v.L2_attention_linear_1, v.L2_attention_linear_2,
        v.L2_attention_rmsnorm_2, v.L2_attention_rmsnorm_2_rstd, v.L2_attention_linear_3,
        v.L2_attention_mla_attention_0, v.L2_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_2_attention_norm, p.layers_2_attention_q_down, p.layers_2_attention_q_norm, p.layers_2_attention_q_up,
        p.layers_2_attention_kv_down, p.layers_2_attention_kv_norm, p.layers_2_attention_kv_up,
        p.layers_2_attention_out, v.L1_h
    )
    (
        v.L2_residual, v.L2_x, v.L2_rows, v.L2_gate, v.L2_order, v.L2_counts, v.L2_sequence_loss,
        v.L2_router_rmsnorm_0_rstd, v.L2_router_linear_wide_0, v.L2_router_route_0_expert
    ) = router_T256_D192_4377cb.F(
        p.layers_2_ffn_norm, p.layers_2_ffn_router_weight, p.layers_2_ffn_router_bias, v.L2_entered, v.L2_attended
    )
    del v.L2_entered, v.L2_attended
    c.record('load layers.2', v.L2_counts)
    c.record('sequence_loss L2', v.L2_sequence_loss)
    del v.L2_sequence_loss
    c.counts('F0', a, 'L2', v.L2_counts)
    v.L2_route, v.L2_offsets = c.wait_counts('F0', a, 'L2')
    del v.L2_counts
    c.dispatch('F0', a, 'L2', v.L2_rows, v.L2_gate, v.L2_route)
    v.L2_shared, v.L2_shared_linear_0, v.L2_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.layers_2_ffn_shared_up, p.layers_2_ffn_shared_down, v.L2_x
    )
    v.L2_received_rows, v.L2_received_gate = c.wait_dispatch('F0', a, 'L2')
    del v.L2_rows, v.L2_gate
    v.L2_expert_rows, v.L2_experts_grouped_linear_0, v.L2_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.layers_2_ffn_experts_up, p.layers_2_ffn_experts_down, v.L2_received_rows, v.L2_received_gate, v.L2_offsets
    )
    c.combine('F0', a, 'L2', v.L2_expert_rows, v.L2_route)
    v.L2_returned_rows = c.wait_combine('F0', a, 'L2')
    del v.L2_expert_rows
    v.L2_h = join_T256_D192_ff91c3.F(v.L2_residual, v.L2_shared, v.L2_returned_rows, v.L2_order)
    del v.L2_shared, v.L2_returned_rows
    (
        v.L3_entered, v.L3_attended, v.L3_attention_rmsnorm_0, v.L3_attention_rmsnorm_0_rstd, v.L3_attention_linear_0,
        v.L3_attention_rmsnorm_1, v.L3_attention_rmsnorm_1_rstd, v.L3_attention_linear_1, v.L3_attention_linear_2,
        v.L3_attention_rmsnorm_2, v.L3_attention_rmsnorm_2_rstd, v.L3_attention_linear_3,
        v.L3_attention_mla_attention_0, v.L3_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.layers_3_attention_norm, p.layers_3_attention_q_down, p.layers_3_attention_q_norm, p.layers_3_attention_q_up,
        p.layers_3_attention_kv_down, p.layers_3_attention_kv_norm, p.layers_3_attention_kv_up,
        p.layers_3_attention_out, v.L2_h
    )
    (
        v.L3_residual, v.L3_x, v.L3_rows, v.L3_gate, v.L3_order, v.L3_counts, v.L3_sequence_loss,
        v.L3_router_rmsnorm_0_rstd, v.L3_router_linear_wide_0, v.L3_router_route_0_expert
    ) = router_T256_D192_4377cb.F(
        p.layers_3_ffn_norm, p.layers_3_ffn_router_weight, p.layers_3_ffn_router_bias, v.L3_entered, v.L3_attended
    )
    del v.L3_entered, v.L3_attended
    c.record('load layers.3', v.L3_counts)
    c.record('sequence_loss L3', v.L3_sequence_loss)
    del v.L3_sequence_loss
    c.counts('F0', a, 'L3', v.L3_counts)
    v.L3_route, v.L3_offsets = c.wait_counts('F0', a, 'L3')
    del v.L3_counts
    c.dispatch('F0', a, 'L3', v.L3_rows, v.L3_gate, v.L3_route)
    v.L3_shared, v.L3_shared_linear_0, v.L3_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.layers_3_ffn_shared_up, p.layers_3_ffn_shared_down, v.L3_x
    )
    v.L3_received_rows, v.L3_received_gate = c.wait_dispatch('F0', a, 'L3')
    del v.L3_rows, v.L3_gate
    v.L3_expert_rows, v.L3_experts_grouped_linear_0, v.L3_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.layers_3_ffn_experts_up, p.layers_3_ffn_experts_down, v.L3_received_rows, v.L3_received_gate, v.L3_offsets
    )
    c.combine('F0', a, 'L3', v.L3_expert_rows, v.L3_route)
    v.L3_returned_rows = c.wait_combine('F0', a, 'L3')
    del v.L3_expert_rows
    v.L3_h = join_T256_D192_ff91c3.F(v.L3_residual, v.L3_shared, v.L3_returned_rows, v.L3_order)
    del v.L3_shared, v.L3_returned_rows
    c.send(1, 'F0', a, v.L3_h)
    del v.L3_h


def F1(c, p, g, a):
    v = c.values(1, a)
    v.L3_h = c.receive(1, 'F0', a)
    v.final_h, v.final_h_mtp, v.final_norm_rmsnorm_0_rstd = final_norm_T256_D192_1e877b.F(p.final_norm, v.L3_h)
    v.mtp_tokens = c.load('mtp_tokens', a)
    (
        v.M0_input, v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.M0_input_cat2_0
    ) = mtp_input_T256_D192_71ab2b.F(
        p.embedding, p.mtp_0_embedding_norm, p.mtp_0_hidden_norm, p.mtp_0_projection, v.mtp_tokens, v.final_h_mtp
    )
    (
        v.M0_entered, v.M0_attended, v.M0_attention_rmsnorm_0, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0,
        v.M0_attention_rmsnorm_1, v.M0_attention_rmsnorm_1_rstd, v.M0_attention_linear_1, v.M0_attention_linear_2,
        v.M0_attention_rmsnorm_2, v.M0_attention_rmsnorm_2_rstd, v.M0_attention_linear_3,
        v.M0_attention_mla_attention_0, v.M0_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.mtp_0_attention_norm, p.mtp_0_attention_q_down, p.mtp_0_attention_q_norm, p.mtp_0_attention_q_up,
        p.mtp_0_attention_kv_down, p.mtp_0_attention_kv_norm, p.mtp_0_attention_kv_up, p.mtp_0_attention_out, v.M0_input
    )
    (
        v.M0_residual, v.M0_x, v.M0_rows, v.M0_gate, v.M0_order, v.M0_counts, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_linear_wide_0, v.M0_router_route_0_expert
    ) = router_T256_D192_357fe5.F(
        p.mtp_0_ffn_norm, p.mtp_0_ffn_router_weight, p.mtp_0_ffn_router_bias, v.M0_entered, v.M0_attended
    )
    del v.M0_entered, v.M0_attended
    c.record('load mtp.0', v.M0_counts)
    c.counts('F1', a, 'M0', v.M0_counts)
    v.M0_route, v.M0_offsets = c.wait_counts('F1', a, 'M0')
    del v.M0_counts
    c.dispatch('F1', a, 'M0', v.M0_rows, v.M0_gate, v.M0_route)
    v.targets = c.load('targets', a)
    v.loss, v.head_linear_0, v.head_cross_entropy_0_lse = head_T256_D192_9c7d09.F(p.head, v.final_h, v.targets)
    c.record('loss', v.loss)
    del v.loss
    v.M0_received_rows, v.M0_received_gate = c.wait_dispatch('F1', a, 'M0')
    del v.M0_rows, v.M0_gate
    v.M0_expert_rows, v.M0_experts_grouped_linear_0, v.M0_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.mtp_0_ffn_experts_up, p.mtp_0_ffn_experts_down, v.M0_received_rows, v.M0_received_gate, v.M0_offsets
    )
    c.combine('F1', a, 'M0', v.M0_expert_rows, v.M0_route)
    v.M0_shared, v.M0_shared_linear_0, v.M0_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.mtp_0_ffn_shared_up, p.mtp_0_ffn_shared_down, v.M0_x
    )
    v.M0_returned_rows = c.wait_combine('F1', a, 'M0')
    del v.M0_expert_rows
    v.M0_h = join_T256_D192_ff91c3.F(v.M0_residual, v.M0_shared, v.M0_returned_rows, v.M0_order)
    del v.M0_shared, v.M0_returned_rows
    v.M0_final_h, v.M0_final_norm_rmsnorm_0_rstd = final_norm_T256_D192_34219e.F(p.mtp_0_final_norm, v.M0_h)
    v.mtp_targets = c.load('mtp_targets', a)
    v.mtp_loss, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse = head_T256_D192_9c7d09.F(
        p.head, v.M0_final_h, v.mtp_targets
    )
    c.record('mtp_loss', v.mtp_loss)
    del v.mtp_loss


def F1_B0(c, p, g, a, b):
    v = c.values(1, a)
    w = c.values(0, b)
    w.d_L3_h = c.receive(1, 'B1', b)
    w.d_L3_residual, w.d_L3_shared, w.d_L3_returned_rows = join_T256_D192_ff91c3.I(w.L3_order, w.d_L3_h)
    del w.d_L3_h
    c.combine('I0', b, 'L3', w.d_L3_returned_rows, w.L3_route)
    w.d_L3_x, w.L3_shared_d_linear_0 = shared_T256_D192_bd4458.I(
        p.layers_3_ffn_shared_up, p.layers_3_ffn_shared_down, w.L3_shared_linear_0, w.d_L3_shared
    )
    del w.L3_shared_linear_0
    shared_T256_D192_bd4458.W(
        g.layers_3_ffn_shared_up, g.layers_3_ffn_shared_down, w.L3_x, w.L3_shared_swiglu_0, w.d_L3_shared,
        w.L3_shared_d_linear_0
    )
    del w.L3_shared_swiglu_0, w.d_L3_shared, w.L3_shared_d_linear_0
    v.L3_h = c.receive(1, 'F0', a)
    v.final_h, v.final_h_mtp, v.final_norm_rmsnorm_0_rstd = final_norm_T256_D192_1e877b.F(p.final_norm, v.L3_h)
    v.mtp_tokens = c.load('mtp_tokens', a)
    (
        v.M0_input, v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.M0_input_cat2_0
    ) = mtp_input_T256_D192_71ab2b.F(
        p.embedding, p.mtp_0_embedding_norm, p.mtp_0_hidden_norm, p.mtp_0_projection, v.mtp_tokens, v.final_h_mtp
    )
    (
        v.M0_entered, v.M0_attended, v.M0_attention_rmsnorm_0, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0,
        v.M0_attention_rmsnorm_1, v.M0_attention_rmsnorm_1_rstd, v.M0_attention_linear_1, v.M0_attention_linear_2,
        v.M0_attention_rmsnorm_2, v.M0_attention_rmsnorm_2_rstd, v.M0_attention_linear_3,
        v.M0_attention_mla_attention_0, v.M0_attention_mla_attention_0_lse
    ) = attention_T256_D192_42a366.F(
        p.mtp_0_attention_norm, p.mtp_0_attention_q_down, p.mtp_0_attention_q_norm, p.mtp_0_attention_q_up,
        p.mtp_0_attention_kv_down, p.mtp_0_attention_kv_norm, p.mtp_0_attention_kv_up, p.mtp_0_attention_out, v.M0_input
    )
    w.d_L3_expert_rows = c.wait_combine('I0', b, 'L3')
    del w.d_L3_returned_rows
    w.d_L3_received_rows, w.d_L3_received_gate, w.L3_experts_d_grouped_linear_0 = experts_D192_E8_8204a1.I(
        p.layers_3_ffn_experts_up, p.layers_3_ffn_experts_down, w.L3_received_gate, w.L3_offsets,
        w.L3_experts_grouped_linear_0, w.d_L3_expert_rows
    )
    del w.L3_received_gate, w.L3_experts_grouped_linear_0
    c.dispatch('I0', b, 'L3', w.d_L3_received_rows, w.d_L3_received_gate, w.L3_route)
    (
        v.M0_residual, v.M0_x, v.M0_rows, v.M0_gate, v.M0_order, v.M0_counts, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_linear_wide_0, v.M0_router_route_0_expert
    ) = router_T256_D192_357fe5.F(
        p.mtp_0_ffn_norm, p.mtp_0_ffn_router_weight, p.mtp_0_ffn_router_bias, v.M0_entered, v.M0_attended
    )
    del v.M0_entered, v.M0_attended
    c.record('load mtp.0', v.M0_counts)
    c.counts('F1', a, 'M0', v.M0_counts)
    v.M0_shared, v.M0_shared_linear_0, v.M0_shared_swiglu_0 = shared_T256_D192_bd4458.F(
        p.mtp_0_ffn_shared_up, p.mtp_0_ffn_shared_down, v.M0_x
    )
    v.targets = c.load('targets', a)
    v.loss, v.head_linear_0, v.head_cross_entropy_0_lse = head_T256_D192_9c7d09.F(p.head, v.final_h, v.targets)
    c.record('loss', v.loss)
    del v.loss
    v.M0_route, v.M0_offsets = c.wait_counts('F1', a, 'M0')
    del v.M0_counts
    c.dispatch('F1', a, 'M0', v.M0_rows, v.M0_gate, v.M0_route)
    w.d_L3_sequence_loss = c.constant('sequence_loss L3')
    w.d_L3_rows, w.d_L3_gate = c.wait_dispatch('I0', b, 'L3')
    del w.d_L3_received_rows, w.d_L3_received_gate, w.L3_route
    w.d_L3_entered, w.d_L3_attended, w.L3_router_d_linear_wide_0, w.L3_router_d_rmsnorm_0 = router_T256_D192_4377cb.I(
        p.layers_3_ffn_norm, p.layers_3_ffn_router_weight, w.L3_residual, w.L3_order, w.L3_router_rmsnorm_0_rstd,
        w.L3_router_linear_wide_0, w.L3_router_route_0_expert, w.d_L3_residual, w.d_L3_x, w.d_L3_rows, w.d_L3_gate,
        w.d_L3_sequence_loss
    )
    del (
        w.L3_order, w.L3_router_linear_wide_0, w.L3_router_route_0_expert, w.d_L3_residual, w.d_L3_x, w.d_L3_rows,
        w.d_L3_gate, w.d_L3_sequence_loss
    )
    router_T256_D192_4377cb.W(
        g.layers_3_ffn_norm, g.layers_3_ffn_router_weight, w.L3_residual, w.L3_x, w.L3_router_rmsnorm_0_rstd,
        w.L3_router_d_linear_wide_0, w.L3_router_d_rmsnorm_0
    )
    del w.L3_residual, w.L3_x, w.L3_router_rmsnorm_0_rstd, w.L3_router_d_linear_wide_0, w.L3_router_d_rmsnorm_0
    (
        w.d_L2_h, w.L3_attention_d_linear_1, w.L3_attention_d_linear_3, w.L3_attention_d_rmsnorm_2,
        w.L3_attention_d_linear_2, w.L3_attention_d_rmsnorm_1, w.L3_attention_d_linear_0, w.L3_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_3_attention_norm, p.layers_3_attention_q_down, p.layers_3_attention_q_norm, p.layers_3_attention_q_up,
        p.layers_3_attention_kv_down, p.layers_3_attention_kv_norm, p.layers_3_attention_kv_up,
        p.layers_3_attention_out, w.L2_h, w.L3_attention_rmsnorm_0_rstd, w.L3_attention_linear_0,
        w.L3_attention_rmsnorm_1_rstd, w.L3_attention_linear_1, w.L3_attention_linear_2, w.L3_attention_rmsnorm_2_rstd,
        w.L3_attention_linear_3, w.L3_attention_mla_attention_0, w.L3_attention_mla_attention_0_lse, w.d_L3_entered,
        w.d_L3_attended
    )
    del w.L3_attention_linear_1, w.L3_attention_linear_3, w.L3_attention_mla_attention_0_lse, w.d_L3_entered
    w.d_L2_residual, w.d_L2_shared, w.d_L2_returned_rows = join_T256_D192_ff91c3.I(w.L2_order, w.d_L2_h)
    del w.d_L2_h
    c.combine('I0', b, 'L2', w.d_L2_returned_rows, w.L2_route)
    w.d_L2_x, w.L2_shared_d_linear_0 = shared_T256_D192_bd4458.I(
        p.layers_2_ffn_shared_up, p.layers_2_ffn_shared_down, w.L2_shared_linear_0, w.d_L2_shared
    )
    del w.L2_shared_linear_0
    shared_T256_D192_bd4458.W(
        g.layers_2_ffn_shared_up, g.layers_2_ffn_shared_down, w.L2_x, w.L2_shared_swiglu_0, w.d_L2_shared,
        w.L2_shared_d_linear_0
    )
    del w.L2_shared_swiglu_0, w.d_L2_shared, w.L2_shared_d_linear_0
    v.M0_received_rows, v.M0_received_gate = c.wait_dispatch('F1', a, 'M0')
    del v.M0_rows, v.M0_gate
    v.M0_expert_rows, v.M0_experts_grouped_linear_0, v.M0_experts_gated_swiglu_0 = experts_D192_E8_8204a1.F(
        p.mtp_0_ffn_experts_up, p.mtp_0_ffn_experts_down, v.M0_received_rows, v.M0_received_gate, v.M0_offsets
    )
    c.combine('F1', a, 'M0', v.M0_expert_rows, v.M0_route)
    w.d_L2_expert_rows = c.wait_combine('I0', b, 'L2')
    del w.d_L2_returned_rows
    w.d_L2_received_rows, w.d_L2_received_gate, w.L2_experts_d_grouped_linear_0 = experts_D192_E8_8204a1.I(
        p.layers_2_ffn_experts_up, p.layers_2_ffn_experts_down, w.L2_received_gate, w.L2_offsets,
        w.L2_experts_grouped_linear_0, w.d_L2_expert_rows
    )
    del w.L2_received_gate, w.L2_experts_grouped_linear_0
    c.dispatch('I0', b, 'L2', w.d_L2_received_rows, w.d_L2_received_gate, w.L2_route)
    v.M0_returned_rows = c.wait_combine('F1', a, 'M0')
    del v.M0_expert_rows
    v.M0_h = join_T256_D192_ff91c3.F(v.M0_residual, v.M0_shared, v.M0_returned_rows, v.M0_order)
    del v.M0_shared, v.M0_returned_rows
    v.M0_final_h, v.M0_final_norm_rmsnorm_0_rstd = final_norm_T256_D192_34219e.F(p.mtp_0_final_norm, v.M0_h)
    v.mtp_targets = c.load('mtp_targets', a)
    v.mtp_loss, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse = head_T256_D192_9c7d09.F(
        p.head, v.M0_final_h, v.mtp_targets
    )
    c.record('mtp_loss', v.mtp_loss)
    del v.mtp_loss
    w.d_L2_sequence_loss = c.constant('sequence_loss L2')
    w.d_L2_rows, w.d_L2_gate = c.wait_dispatch('I0', b, 'L2')
    del w.d_L2_received_rows, w.d_L2_received_gate, w.L2_route
    w.d_L2_entered, w.d_L2_attended, w.L2_router_d_linear_wide_0, w.L2_router_d_rmsnorm_0 = router_T256_D192_4377cb.I(
        p.layers_2_ffn_norm, p.layers_2_ffn_router_weight, w.L2_residual, w.L2_order, w.L2_router_rmsnorm_0_rstd,
        w.L2_router_linear_wide_0, w.L2_router_route_0_expert, w.d_L2_residual, w.d_L2_x, w.d_L2_rows, w.d_L2_gate,
        w.d_L2_sequence_loss
    )
    del (
        w.L2_order, w.L2_router_linear_wide_0, w.L2_router_route_0_expert, w.d_L2_residual, w.d_L2_x, w.d_L2_rows,
        w.d_L2_gate, w.d_L2_sequence_loss
    )
    router_T256_D192_4377cb.W(
        g.layers_2_ffn_norm, g.layers_2_ffn_router_weight, w.L2_residual, w.L2_x, w.L2_router_rmsnorm_0_rstd,
        w.L2_router_d_linear_wide_0, w.L2_router_d_rmsnorm_0
    )
    del w.L2_residual, w.L2_x, w.L2_router_rmsnorm_0_rstd, w.L2_router_d_linear_wide_0, w.L2_router_d_rmsnorm_0
    (
        w.d_L1_h, w.L2_attention_d_linear_1, w.L2_attention_d_linear_3, w.L2_attention_d_rmsnorm_2,
        w.L2_attention_d_linear_2, w.L2_attention_d_rmsnorm_1, w.L2_attention_d_linear_0, w.L2_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_2_attention_norm, p.layers_2_attention_q_down, p.layers_2_attention_q_norm, p.layers_2_attention_q_up,
        p.layers_2_attention_kv_down, p.layers_2_attention_kv_norm, p.layers_2_attention_kv_up,
        p.layers_2_attention_out, w.L1_h, w.L2_attention_rmsnorm_0_rstd, w.L2_attention_linear_0,
        w.L2_attention_rmsnorm_1_rstd, w.L2_attention_linear_1, w.L2_attention_linear_2, w.L2_attention_rmsnorm_2_rstd,
        w.L2_attention_linear_3, w.L2_attention_mla_attention_0, w.L2_attention_mla_attention_0_lse, w.d_L2_entered,
        w.d_L2_attended
    )
    del w.L2_attention_linear_1, w.L2_attention_linear_3, w.L2_attention_mla_attention_0_lse, w.d_L2_entered
    attention_T256_D192_42a366.W(
        g.layers_2_attention_norm, g.layers_2_attention_q_down, g.layers_2_attention_q_norm, g.layers_2_attention_q_up,
        g.layers_2_attention_kv_down, g.layers_2_attention_kv_norm, g.layers_2_attention_kv_up,
        g.layers_2_attention_out, w.L1_h, w.L2_attention_rmsnorm_0, w.L2_attention_rmsnorm_0_rstd,
        w.L2_attention_linear_0, w.L2_attention_rmsnorm_1, w.L2_attention_rmsnorm_1_rstd, w.L2_attention_linear_2,
        w.L2_attention_rmsnorm_2, w.L2_attention_rmsnorm_2_rstd, w.L2_attention_mla_attention_0, w.d_L2_attended,
        w.L2_attention_d_linear_1, w.L2_attention_d_linear_3, w.L2_attention_d_rmsnorm_2, w.L2_attention_d_linear_2,
        w.L2_attention_d_rmsnorm_1, w.L2_attention_d_linear_0, w.L2_attention_d_rmsnorm_0
    )
    del (
        w.L1_h, w.L2_attention_rmsnorm_0, w.L2_attention_rmsnorm_0_rstd, w.L2_attention_linear_0,
        w.L2_attention_rmsnorm_1, w.L2_attention_rmsnorm_1_rstd, w.L2_attention_linear_2, w.L2_attention_rmsnorm_2,
        w.L2_attention_rmsnorm_2_rstd, w.L2_attention_mla_attention_0, w.d_L2_attended, w.L2_attention_d_linear_1,
        w.L2_attention_d_linear_3, w.L2_attention_d_rmsnorm_2, w.L2_attention_d_linear_2, w.L2_attention_d_rmsnorm_1,
        w.L2_attention_d_linear_0, w.L2_attention_d_rmsnorm_0
    )
    w.d_L1_residual, w.d_L1_shared, w.d_L1_returned_rows = join_T256_D192_ff91c3.I(w.L1_order, w.d_L1_h)
    del w.d_L1_h
    c.combine('I0', b, 'L1', w.d_L1_returned_rows, w.L1_route)
    w.d_L1_x, w.L1_shared_d_linear_0 = shared_T256_D192_bd4458.I(
        p.layers_1_ffn_shared_up, p.layers_1_ffn_shared_down, w.L1_shared_linear_0, w.d_L1_shared
    )
    del w.L1_shared_linear_0
    shared_T256_D192_bd4458.W(
        g.layers_1_ffn_shared_up, g.layers_1_ffn_shared_down, w.L1_x, w.L1_shared_swiglu_0, w.d_L1_shared,
        w.L1_shared_d_linear_0
    )
    del w.L1_shared_swiglu_0, w.d_L1_shared, w.L1_shared_d_linear_0
    experts_D192_E8_8204a1.W(
        g.layers_3_ffn_experts_up, g.layers_3_ffn_experts_down, w.L3_received_rows, w.L3_offsets,
        w.L3_experts_gated_swiglu_0, w.d_L3_expert_rows, w.L3_experts_d_grouped_linear_0
    )
    del (
        w.L3_received_rows, w.L3_offsets, w.L3_experts_gated_swiglu_0, w.d_L3_expert_rows,
        w.L3_experts_d_grouped_linear_0
    )
    w.d_L1_expert_rows = c.wait_combine('I0', b, 'L1')
    del w.d_L1_returned_rows
    w.d_L1_received_rows, w.d_L1_received_gate, w.L1_experts_d_grouped_linear_0 = experts_D192_E8_8204a1.I(
        p.layers_1_ffn_experts_up, p.layers_1_ffn_experts_down, w.L1_received_gate, w.L1_offsets,
        w.L1_experts_grouped_linear_0, w.d_L1_expert_rows
    )
    del w.L1_received_gate, w.L1_experts_grouped_linear_0
    c.dispatch('I0', b, 'L1', w.d_L1_received_rows, w.d_L1_received_gate, w.L1_route)
    experts_D192_E8_8204a1.W(
        g.layers_1_ffn_experts_up, g.layers_1_ffn_experts_down, w.L1_received_rows, w.L1_offsets,
        w.L1_experts_gated_swiglu_0, w.d_L1_expert_rows, w.L1_experts_d_grouped_linear_0
    )
    del (
        w.L1_received_rows, w.L1_offsets, w.L1_experts_gated_swiglu_0, w.d_L1_expert_rows,
        w.L1_experts_d_grouped_linear_0
    )
    experts_D192_E8_8204a1.W(
        g.layers_2_ffn_experts_up, g.layers_2_ffn_experts_down, w.L2_received_rows, w.L2_offsets,
        w.L2_experts_gated_swiglu_0, w.d_L2_expert_rows, w.L2_experts_d_grouped_linear_0
    )
    del (
        w.L2_received_rows, w.L2_offsets, w.L2_experts_gated_swiglu_0, w.d_L2_expert_rows,
        w.L2_experts_d_grouped_linear_0
    )
    attention_T256_D192_42a366.W(
        g.layers_3_attention_norm, g.layers_3_attention_q_down, g.layers_3_attention_q_norm, g.layers_3_attention_q_up,
        g.layers_3_attention_kv_down, g.layers_3_attention_kv_norm, g.layers_3_attention_kv_up,
        g.layers_3_attention_out, w.L2_h, w.L3_attention_rmsnorm_0, w.L3_attention_rmsnorm_0_rstd,
        w.L3_attention_linear_0, w.L3_attention_rmsnorm_1, w.L3_attention_rmsnorm_1_rstd, w.L3_attention_linear_2,
        w.L3_attention_rmsnorm_2, w.L3_attention_rmsnorm_2_rstd, w.L3_attention_mla_attention_0, w.d_L3_attended,
        w.L3_attention_d_linear_1, w.L3_attention_d_linear_3, w.L3_attention_d_rmsnorm_2, w.L3_attention_d_linear_2,
        w.L3_attention_d_rmsnorm_1, w.L3_attention_d_linear_0, w.L3_attention_d_rmsnorm_0
    )
    del (
        w.L2_h, w.L3_attention_rmsnorm_0, w.L3_attention_rmsnorm_0_rstd, w.L3_attention_linear_0,
        w.L3_attention_rmsnorm_1, w.L3_attention_rmsnorm_1_rstd, w.L3_attention_linear_2, w.L3_attention_rmsnorm_2,
        w.L3_attention_rmsnorm_2_rstd, w.L3_attention_mla_attention_0, w.d_L3_attended, w.L3_attention_d_linear_1,
        w.L3_attention_d_linear_3, w.L3_attention_d_rmsnorm_2, w.L3_attention_d_linear_2, w.L3_attention_d_rmsnorm_1,
        w.L3_attention_d_linear_0, w.L3_attention_d_rmsnorm_0
    )
    w.d_L1_sequence_loss = c.constant('sequence_loss L1')
    w.d_L1_rows, w.d_L1_gate = c.wait_dispatch('I0', b, 'L1')
    del w.d_L1_received_rows, w.d_L1_received_gate, w.L1_route
    w.d_L1_entered, w.d_L1_attended, w.L1_router_d_linear_wide_0, w.L1_router_d_rmsnorm_0 = router_T256_D192_4377cb.I(
        p.layers_1_ffn_norm, p.layers_1_ffn_router_weight, w.L1_residual, w.L1_order, w.L1_router_rmsnorm_0_rstd,
        w.L1_router_linear_wide_0, w.L1_router_route_0_expert, w.d_L1_residual, w.d_L1_x, w.d_L1_rows, w.d_L1_gate,
        w.d_L1_sequence_loss
    )
    del (
        w.L1_order, w.L1_router_linear_wide_0, w.L1_router_route_0_expert, w.d_L1_residual, w.d_L1_x, w.d_L1_rows,
        w.d_L1_gate, w.d_L1_sequence_loss
    )
    router_T256_D192_4377cb.W(
        g.layers_1_ffn_norm, g.layers_1_ffn_router_weight, w.L1_residual, w.L1_x, w.L1_router_rmsnorm_0_rstd,
        w.L1_router_d_linear_wide_0, w.L1_router_d_rmsnorm_0
    )
    del w.L1_residual, w.L1_x, w.L1_router_rmsnorm_0_rstd, w.L1_router_d_linear_wide_0, w.L1_router_d_rmsnorm_0
    (
        w.d_L0_h, w.L1_attention_d_linear_1, w.L1_attention_d_linear_3, w.L1_attention_d_rmsnorm_2,
        w.L1_attention_d_linear_2, w.L1_attention_d_rmsnorm_1, w.L1_attention_d_linear_0, w.L1_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_1_attention_norm, p.layers_1_attention_q_down, p.layers_1_attention_q_norm, p.layers_1_attention_q_up,
        p.layers_1_attention_kv_down, p.layers_1_attention_kv_norm, p.layers_1_attention_kv_up,
        p.layers_1_attention_out, w.L0_h, w.L1_attention_rmsnorm_0_rstd, w.L1_attention_linear_0,
        w.L1_attention_rmsnorm_1_rstd, w.L1_attention_linear_1, w.L1_attention_linear_2, w.L1_attention_rmsnorm_2_rstd,
        w.L1_attention_linear_3, w.L1_attention_mla_attention_0, w.L1_attention_mla_attention_0_lse, w.d_L1_entered,
        w.d_L1_attended
    )
    del w.L1_attention_linear_1, w.L1_attention_linear_3, w.L1_attention_mla_attention_0_lse, w.d_L1_entered
    attention_T256_D192_42a366.W(
        g.layers_1_attention_norm, g.layers_1_attention_q_down, g.layers_1_attention_q_norm, g.layers_1_attention_q_up,
        g.layers_1_attention_kv_down, g.layers_1_attention_kv_norm, g.layers_1_attention_kv_up,
        g.layers_1_attention_out, w.L0_h, w.L1_attention_rmsnorm_0, w.L1_attention_rmsnorm_0_rstd,
        w.L1_attention_linear_0, w.L1_attention_rmsnorm_1, w.L1_attention_rmsnorm_1_rstd, w.L1_attention_linear_2,
        w.L1_attention_rmsnorm_2, w.L1_attention_rmsnorm_2_rstd, w.L1_attention_mla_attention_0, w.d_L1_attended,
        w.L1_attention_d_linear_1, w.L1_attention_d_linear_3, w.L1_attention_d_rmsnorm_2, w.L1_attention_d_linear_2,
        w.L1_attention_d_rmsnorm_1, w.L1_attention_d_linear_0, w.L1_attention_d_rmsnorm_0
    )
    del (
        w.L0_h, w.L1_attention_rmsnorm_0, w.L1_attention_rmsnorm_0_rstd, w.L1_attention_linear_0,
        w.L1_attention_rmsnorm_1, w.L1_attention_rmsnorm_1_rstd, w.L1_attention_linear_2, w.L1_attention_rmsnorm_2,
        w.L1_attention_rmsnorm_2_rstd, w.L1_attention_mla_attention_0, w.d_L1_attended, w.L1_attention_d_linear_1,
        w.L1_attention_d_linear_3, w.L1_attention_d_rmsnorm_2, w.L1_attention_d_linear_2, w.L1_attention_d_rmsnorm_1,
        w.L1_attention_d_linear_0, w.L1_attention_d_rmsnorm_0
    )
    w.d_L0_entered, w.d_L0_attended, w.L0_dense_d_linear_0, w.L0_dense_d_rmsnorm_0 = dense_T256_D192_2fae2c.I(
        p.layers_0_ffn_norm, p.layers_0_ffn_up, p.layers_0_ffn_down, w.L0_dense_add_0, w.L0_dense_rmsnorm_0_rstd,
        w.L0_dense_linear_0, w.d_L0_h
    )
    del w.L0_dense_linear_0
    dense_T256_D192_2fae2c.W(
        g.layers_0_ffn_norm, g.layers_0_ffn_up, g.layers_0_ffn_down, w.L0_dense_add_0, w.L0_dense_rmsnorm_0,
        w.L0_dense_rmsnorm_0_rstd, w.L0_dense_swiglu_0, w.d_L0_h, w.L0_dense_d_linear_0, w.L0_dense_d_rmsnorm_0
    )
    del (
        w.L0_dense_add_0, w.L0_dense_rmsnorm_0, w.L0_dense_rmsnorm_0_rstd, w.L0_dense_swiglu_0, w.d_L0_h,
        w.L0_dense_d_linear_0, w.L0_dense_d_rmsnorm_0
    )
    (
        w.d_embed_h, w.L0_attention_d_linear_1, w.L0_attention_d_linear_3, w.L0_attention_d_rmsnorm_2,
        w.L0_attention_d_linear_2, w.L0_attention_d_rmsnorm_1, w.L0_attention_d_linear_0, w.L0_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_0_attention_norm, p.layers_0_attention_q_down, p.layers_0_attention_q_norm, p.layers_0_attention_q_up,
        p.layers_0_attention_kv_down, p.layers_0_attention_kv_norm, p.layers_0_attention_kv_up,
        p.layers_0_attention_out, w.embed_h, w.L0_attention_rmsnorm_0_rstd, w.L0_attention_linear_0,
        w.L0_attention_rmsnorm_1_rstd, w.L0_attention_linear_1, w.L0_attention_linear_2, w.L0_attention_rmsnorm_2_rstd,
        w.L0_attention_linear_3, w.L0_attention_mla_attention_0, w.L0_attention_mla_attention_0_lse, w.d_L0_entered,
        w.d_L0_attended
    )
    del w.L0_attention_linear_1, w.L0_attention_linear_3, w.L0_attention_mla_attention_0_lse, w.d_L0_entered
    embed_T256_552fd3.W(g.embedding, w.tokens, w.d_embed_h)
    del w.tokens, w.d_embed_h
    attention_T256_D192_42a366.W(
        g.layers_0_attention_norm, g.layers_0_attention_q_down, g.layers_0_attention_q_norm, g.layers_0_attention_q_up,
        g.layers_0_attention_kv_down, g.layers_0_attention_kv_norm, g.layers_0_attention_kv_up,
        g.layers_0_attention_out, w.embed_h, w.L0_attention_rmsnorm_0, w.L0_attention_rmsnorm_0_rstd,
        w.L0_attention_linear_0, w.L0_attention_rmsnorm_1, w.L0_attention_rmsnorm_1_rstd, w.L0_attention_linear_2,
        w.L0_attention_rmsnorm_2, w.L0_attention_rmsnorm_2_rstd, w.L0_attention_mla_attention_0, w.d_L0_attended,
        w.L0_attention_d_linear_1, w.L0_attention_d_linear_3, w.L0_attention_d_rmsnorm_2, w.L0_attention_d_linear_2,
        w.L0_attention_d_rmsnorm_1, w.L0_attention_d_linear_0, w.L0_attention_d_rmsnorm_0
    )
    del (
        w.embed_h, w.L0_attention_rmsnorm_0, w.L0_attention_rmsnorm_0_rstd, w.L0_attention_linear_0,
        w.L0_attention_rmsnorm_1, w.L0_attention_rmsnorm_1_rstd, w.L0_attention_linear_2, w.L0_attention_rmsnorm_2,
        w.L0_attention_rmsnorm_2_rstd, w.L0_attention_mla_attention_0, w.d_L0_attended, w.L0_attention_d_linear_1,
        w.L0_attention_d_linear_3, w.L0_attention_d_rmsnorm_2, w.L0_attention_d_linear_2, w.L0_attention_d_rmsnorm_1,
        w.L0_attention_d_linear_0, w.L0_attention_d_rmsnorm_0
    )


def I0(c, p, g, a):
    v = c.values(0, a)
    v.d_L3_h = c.receive(1, 'B1', a)
    v.d_L3_residual, v.d_L3_shared, v.d_L3_returned_rows = join_T256_D192_ff91c3.I(v.L3_order, v.d_L3_h)
    del v.d_L3_h
    c.combine('I0', a, 'L3', v.d_L3_returned_rows, v.L3_route)
    v.d_L3_x, v.L3_shared_d_linear_0 = shared_T256_D192_bd4458.I(
        p.layers_3_ffn_shared_up, p.layers_3_ffn_shared_down, v.L3_shared_linear_0, v.d_L3_shared
    )
    del v.L3_shared_linear_0
    v.d_L3_expert_rows = c.wait_combine('I0', a, 'L3')
    del v.d_L3_returned_rows
    v.d_L3_received_rows, v.d_L3_received_gate, v.L3_experts_d_grouped_linear_0 = experts_D192_E8_8204a1.I(
        p.layers_3_ffn_experts_up, p.layers_3_ffn_experts_down, v.L3_received_gate, v.L3_offsets,
        v.L3_experts_grouped_linear_0, v.d_L3_expert_rows
    )
    del v.L3_received_gate, v.L3_experts_grouped_linear_0
    c.dispatch('I0', a, 'L3', v.d_L3_received_rows, v.d_L3_received_gate, v.L3_route)
    v.d_L3_sequence_loss = c.constant('sequence_loss L3')
    v.d_L3_rows, v.d_L3_gate = c.wait_dispatch('I0', a, 'L3')
    del v.d_L3_received_rows, v.d_L3_received_gate, v.L3_route
    v.d_L3_entered, v.d_L3_attended, v.L3_router_d_linear_wide_0, v.L3_router_d_rmsnorm_0 = router_T256_D192_4377cb.I(
        p.layers_3_ffn_norm, p.layers_3_ffn_router_weight, v.L3_residual, v.L3_order, v.L3_router_rmsnorm_0_rstd,
        v.L3_router_linear_wide_0, v.L3_router_route_0_expert, v.d_L3_residual, v.d_L3_x, v.d_L3_rows, v.d_L3_gate,
        v.d_L3_sequence_loss
    )
    del (
        v.L3_order, v.L3_router_linear_wide_0, v.L3_router_route_0_expert, v.d_L3_residual, v.d_L3_x, v.d_L3_rows,
        v.d_L3_gate, v.d_L3_sequence_loss
    )
    (
        v.d_L2_h, v.L3_attention_d_linear_1, v.L3_attention_d_linear_3, v.L3_attention_d_rmsnorm_2,
        v.L3_attention_d_linear_2, v.L3_attention_d_rmsnorm_1, v.L3_attention_d_linear_0, v.L3_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_3_attention_norm, p.layers_3_attention_q_down, p.layers_3_attention_q_norm, p.layers_3_attention_q_up,
        p.layers_3_attention_kv_down, p.layers_3_attention_kv_norm, p.layers_3_attention_kv_up,
        p.layers_3_attention_out, v.L2_h, v.L3_attention_rmsnorm_0_rstd, v.L3_attention_linear_0,
        v.L3_attention_rmsnorm_1_rstd, v.L3_attention_linear_1, v.L3_attention_linear_2, v.L3_attention_rmsnorm_2_rstd,
        v.L3_attention_linear_3, v.L3_attention_mla_attention_0, v.L3_attention_mla_attention_0_lse, v.d_L3_entered,
        v.d_L3_attended
    )
    del v.L3_attention_linear_1, v.L3_attention_linear_3, v.L3_attention_mla_attention_0_lse, v.d_L3_entered
    v.d_L2_residual, v.d_L2_shared, v.d_L2_returned_rows = join_T256_D192_ff91c3.I(v.L2_order, v.d_L2_h)
    del v.d_L2_h
    c.combine('I0', a, 'L2', v.d_L2_returned_rows, v.L2_route)
    v.d_L2_x, v.L2_shared_d_linear_0 = shared_T256_D192_bd4458.I(
        p.layers_2_ffn_shared_up, p.layers_2_ffn_shared_down, v.L2_shared_linear_0, v.d_L2_shared
    )
    del v.L2_shared_linear_0
    v.d_L2_expert_rows = c.wait_combine('I0', a, 'L2')
    del v.d_L2_returned_rows
    v.d_L2_received_rows, v.d_L2_received_gate, v.L2_experts_d_grouped_linear_0 = experts_D192_E8_8204a1.I(
        p.layers_2_ffn_experts_up, p.layers_2_ffn_experts_down, v.L2_received_gate, v.L2_offsets,
        v.L2_experts_grouped_linear_0, v.d_L2_expert_rows
    )
    del v.L2_received_gate, v.L2_experts_grouped_linear_0
    c.dispatch('I0', a, 'L2', v.d_L2_received_rows, v.d_L2_received_gate, v.L2_route)
    v.d_L2_sequence_loss = c.constant('sequence_loss L2')
    v.d_L2_rows, v.d_L2_gate = c.wait_dispatch('I0', a, 'L2')
    del v.d_L2_received_rows, v.d_L2_received_gate, v.L2_route
    v.d_L2_entered, v.d_L2_attended, v.L2_router_d_linear_wide_0, v.L2_router_d_rmsnorm_0 = router_T256_D192_4377cb.I(
        p.layers_2_ffn_norm, p.layers_2_ffn_router_weight, v.L2_residual, v.L2_order, v.L2_router_rmsnorm_0_rstd,
        v.L2_router_linear_wide_0, v.L2_router_route_0_expert, v.d_L2_residual, v.d_L2_x, v.d_L2_rows, v.d_L2_gate,
        v.d_L2_sequence_loss
    )
    del (
        v.L2_order, v.L2_router_linear_wide_0, v.L2_router_route_0_expert, v.d_L2_residual, v.d_L2_x, v.d_L2_rows,
        v.d_L2_gate, v.d_L2_sequence_loss
    )
    (
        v.d_L1_h, v.L2_attention_d_linear_1, v.L2_attention_d_linear_3, v.L2_attention_d_rmsnorm_2,
        v.L2_attention_d_linear_2, v.L2_attention_d_rmsnorm_1, v.L2_attention_d_linear_0, v.L2_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_2_attention_norm, p.layers_2_attention_q_down, p.layers_2_attention_q_norm, p.layers_2_attention_q_up,
        p.layers_2_attention_kv_down, p.layers_2_attention_kv_norm, p.layers_2_attention_kv_up,
        p.layers_2_attention_out, v.L1_h, v.L2_attention_rmsnorm_0_rstd, v.L2_attention_linear_0,
        v.L2_attention_rmsnorm_1_rstd, v.L2_attention_linear_1, v.L2_attention_linear_2, v.L2_attention_rmsnorm_2_rstd,
        v.L2_attention_linear_3, v.L2_attention_mla_attention_0, v.L2_attention_mla_attention_0_lse, v.d_L2_entered,
        v.d_L2_attended
    )
    del v.L2_attention_linear_1, v.L2_attention_linear_3, v.L2_attention_mla_attention_0_lse, v.d_L2_entered
    v.d_L1_residual, v.d_L1_shared, v.d_L1_returned_rows = join_T256_D192_ff91c3.I(v.L1_order, v.d_L1_h)
    del v.d_L1_h
    c.combine('I0', a, 'L1', v.d_L1_returned_rows, v.L1_route)
    v.d_L1_x, v.L1_shared_d_linear_0 = shared_T256_D192_bd4458.I(
        p.layers_1_ffn_shared_up, p.layers_1_ffn_shared_down, v.L1_shared_linear_0, v.d_L1_shared
    )
    del v.L1_shared_linear_0
    v.d_L1_expert_rows = c.wait_combine('I0', a, 'L1')
    del v.d_L1_returned_rows
    v.d_L1_received_rows, v.d_L1_received_gate, v.L1_experts_d_grouped_linear_0 = experts_D192_E8_8204a1.I(
        p.layers_1_ffn_experts_up, p.layers_1_ffn_experts_down, v.L1_received_gate, v.L1_offsets,
        v.L1_experts_grouped_linear_0, v.d_L1_expert_rows
    )
    del v.L1_received_gate, v.L1_experts_grouped_linear_0
    c.dispatch('I0', a, 'L1', v.d_L1_received_rows, v.d_L1_received_gate, v.L1_route)
    v.d_L1_sequence_loss = c.constant('sequence_loss L1')
    v.d_L1_rows, v.d_L1_gate = c.wait_dispatch('I0', a, 'L1')
    del v.d_L1_received_rows, v.d_L1_received_gate, v.L1_route
    v.d_L1_entered, v.d_L1_attended, v.L1_router_d_linear_wide_0, v.L1_router_d_rmsnorm_0 = router_T256_D192_4377cb.I(
        p.layers_1_ffn_norm, p.layers_1_ffn_router_weight, v.L1_residual, v.L1_order, v.L1_router_rmsnorm_0_rstd,
        v.L1_router_linear_wide_0, v.L1_router_route_0_expert, v.d_L1_residual, v.d_L1_x, v.d_L1_rows, v.d_L1_gate,
        v.d_L1_sequence_loss
    )
    del (
        v.L1_order, v.L1_router_linear_wide_0, v.L1_router_route_0_expert, v.d_L1_residual, v.d_L1_x, v.d_L1_rows,
        v.d_L1_gate, v.d_L1_sequence_loss
    )
    (
        v.d_L0_h, v.L1_attention_d_linear_1, v.L1_attention_d_linear_3, v.L1_attention_d_rmsnorm_2,
        v.L1_attention_d_linear_2, v.L1_attention_d_rmsnorm_1, v.L1_attention_d_linear_0, v.L1_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_1_attention_norm, p.layers_1_attention_q_down, p.layers_1_attention_q_norm, p.layers_1_attention_q_up,
        p.layers_1_attention_kv_down, p.layers_1_attention_kv_norm, p.layers_1_attention_kv_up,
        p.layers_1_attention_out, v.L0_h, v.L1_attention_rmsnorm_0_rstd, v.L1_attention_linear_0,
        v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_1, v.L1_attention_linear_2, v.L1_attention_rmsnorm_2_rstd,
        v.L1_attention_linear_3, v.L1_attention_mla_attention_0, v.L1_attention_mla_attention_0_lse, v.d_L1_entered,
        v.d_L1_attended
    )
    del v.L1_attention_linear_1, v.L1_attention_linear_3, v.L1_attention_mla_attention_0_lse, v.d_L1_entered
    v.d_L0_entered, v.d_L0_attended, v.L0_dense_d_linear_0, v.L0_dense_d_rmsnorm_0 = dense_T256_D192_2fae2c.I(
        p.layers_0_ffn_norm, p.layers_0_ffn_up, p.layers_0_ffn_down, v.L0_dense_add_0, v.L0_dense_rmsnorm_0_rstd,
        v.L0_dense_linear_0, v.d_L0_h
    )
    del v.L0_dense_linear_0
    (
        v.d_embed_h, v.L0_attention_d_linear_1, v.L0_attention_d_linear_3, v.L0_attention_d_rmsnorm_2,
        v.L0_attention_d_linear_2, v.L0_attention_d_rmsnorm_1, v.L0_attention_d_linear_0, v.L0_attention_d_rmsnorm_0
    ) = attention_T256_D192_42a366.I(
        p.layers_0_attention_norm, p.layers_0_attention_q_down, p.layers_0_attention_q_norm, p.layers_0_attention_q_up,
        p.layers_0_attention_kv_down, p.layers_0_attention_kv_norm, p.layers_0_attention_kv_up,
        p.layers_0_attention_out, v.embed_h, v.L0_attention_rmsnorm_0_rstd, v.L0_attention_linear_0,
        v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_1, v.L0_attention_linear_2, v.L0_attention_rmsnorm_2_rstd,
        v.L0_attention_linear_3, v.L0_attention_mla_attention_0, v.L0_attention_mla_attention_0_lse, v.d_L0_entered,
        v.d_L0_attended
    )
    del v.L0_attention_linear_1, v.L0_attention_linear_3, v.L0_attention_mla_attention_0_lse, v.d_L0_entered


def W0(c, p, g, a):
    v = c.values(0, a)
    experts_D192_E8_8204a1.W(
        g.layers_3_ffn_experts_up, g.layers_3_ffn_experts_down, v.L3_received_rows, v.L3_offsets,
        v.L3_experts_gated_swiglu_0, v.d_L3_expert_rows, v.L3_experts_d_grouped_linear_0
    )
    del (
        v.L3_received_rows, v.L3_offsets, v.L3_experts_gated_swiglu_0, v.d_L3_expert_rows,
        v.L3_experts_d_grouped_linear_0
    )
    shared_T256_D192_bd4458.W(
        g.layers_3_ffn_shared_up, g.layers_3_ffn_shared_down, v.L3_x, v.L3_shared_swiglu_0, v.d_L3_shared,
        v.L3_shared_d_linear_0
    )
    del v.L3_shared_swiglu_0, v.d_L3_shared, v.L3_shared_d_linear_0
    router_T256_D192_4377cb.W(
        g.layers_3_ffn_norm, g.layers_3_ffn_router_weight, v.L3_residual, v.L3_x, v.L3_router_rmsnorm_0_rstd,
        v.L3_router_d_linear_wide_0, v.L3_router_d_rmsnorm_0
    )
    del v.L3_residual, v.L3_x, v.L3_router_rmsnorm_0_rstd, v.L3_router_d_linear_wide_0, v.L3_router_d_rmsnorm_0
    attention_T256_D192_42a366.W(
        g.layers_3_attention_norm, g.layers_3_attention_q_down, g.layers_3_attention_q_norm, g.layers_3_attention_q_up,
        g.layers_3_attention_kv_down, g.layers_3_attention_kv_norm, g.layers_3_attention_kv_up,
        g.layers_3_attention_out, v.L2_h, v.L3_attention_rmsnorm_0, v.L3_attention_rmsnorm_0_rstd,
        v.L3_attention_linear_0, v.L3_attention_rmsnorm_1, v.L3_attention_rmsnorm_1_rstd, v.L3_attention_linear_2,
        v.L3_attention_rmsnorm_2, v.L3_attention_rmsnorm_2_rstd, v.L3_attention_mla_attention_0, v.d_L3_attended,
        v.L3_attention_d_linear_1, v.L3_attention_d_linear_3, v.L3_attention_d_rmsnorm_2, v.L3_attention_d_linear_2,
        v.L3_attention_d_rmsnorm_1, v.L3_attention_d_linear_0, v.L3_attention_d_rmsnorm_0
    )
    del (
        v.L2_h, v.L3_attention_rmsnorm_0, v.L3_attention_rmsnorm_0_rstd, v.L3_attention_linear_0,
        v.L3_attention_rmsnorm_1, v.L3_attention_rmsnorm_1_rstd, v.L3_attention_linear_2, v.L3_attention_rmsnorm_2,
        v.L3_attention_rmsnorm_2_rstd, v.L3_attention_mla_attention_0, v.d_L3_attended, v.L3_attention_d_linear_1,
        v.L3_attention_d_linear_3, v.L3_attention_d_rmsnorm_2, v.L3_attention_d_linear_2, v.L3_attention_d_rmsnorm_1,
        v.L3_attention_d_linear_0, v.L3_attention_d_rmsnorm_0
    )
    experts_D192_E8_8204a1.W(
        g.layers_2_ffn_experts_up, g.layers_2_ffn_experts_down, v.L2_received_rows, v.L2_offsets,
        v.L2_experts_gated_swiglu_0, v.d_L2_expert_rows, v.L2_experts_d_grouped_linear_0
    )
    del (
        v.L2_received_rows, v.L2_offsets, v.L2_experts_gated_swiglu_0, v.d_L2_expert_rows,
        v.L2_experts_d_grouped_linear_0
    )
    shared_T256_D192_bd4458.W(
        g.layers_2_ffn_shared_up, g.layers_2_ffn_shared_down, v.L2_x, v.L2_shared_swiglu_0, v.d_L2_shared,
        v.L2_shared_d_linear_0
    )
    del v.L2_shared_swiglu_0, v.d_L2_shared, v.L2_shared_d_linear_0
    router_T256_D192_4377cb.W(
        g.layers_2_ffn_norm, g.layers_2_ffn_router_weight, v.L2_residual, v.L2_x, v.L2_router_rmsnorm_0_rstd,
        v.L2_router_d_linear_wide_0, v.L2_router_d_rmsnorm_0
    )
    del v.L2_residual, v.L2_x, v.L2_router_rmsnorm_0_rstd, v.L2_router_d_linear_wide_0, v.L2_router_d_rmsnorm_0
    attention_T256_D192_42a366.W(
        g.layers_2_attention_norm, g.layers_2_attention_q_down, g.layers_2_attention_q_norm, g.layers_2_attention_q_up,
        g.layers_2_attention_kv_down, g.layers_2_attention_kv_norm, g.layers_2_attention_kv_up,
        g.layers_2_attention_out, v.L1_h, v.L2_attention_rmsnorm_0, v.L2_attention_rmsnorm_0_rstd,
        v.L2_attention_linear_0, v.L2_attention_rmsnorm_1, v.L2_attention_rmsnorm_1_rstd, v.L2_attention_linear_2,
        v.L2_attention_rmsnorm_2, v.L2_attention_rmsnorm_2_rstd, v.L2_attention_mla_attention_0, v.d_L2_attended,
        v.L2_attention_d_linear_1, v.L2_attention_d_linear_3, v.L2_attention_d_rmsnorm_2, v.L2_attention_d_linear_2,
        v.L2_attention_d_rmsnorm_1, v.L2_attention_d_linear_0, v.L2_attention_d_rmsnorm_0
    )
    del (
        v.L1_h, v.L2_attention_rmsnorm_0, v.L2_attention_rmsnorm_0_rstd, v.L2_attention_linear_0,
        v.L2_attention_rmsnorm_1, v.L2_attention_rmsnorm_1_rstd, v.L2_attention_linear_2, v.L2_attention_rmsnorm_2,
        v.L2_attention_rmsnorm_2_rstd, v.L2_attention_mla_attention_0, v.d_L2_attended, v.L2_attention_d_linear_1,
        v.L2_attention_d_linear_3, v.L2_attention_d_rmsnorm_2, v.L2_attention_d_linear_2, v.L2_attention_d_rmsnorm_1,
        v.L2_attention_d_linear_0, v.L2_attention_d_rmsnorm_0
    )
    experts_D192_E8_8204a1.W(
        g.layers_1_ffn_experts_up, g.layers_1_ffn_experts_down, v.L1_received_rows, v.L1_offsets,
        v.L1_experts_gated_swiglu_0, v.d_L1_expert_rows, v.L1_experts_d_grouped_linear_0
    )
    del (
        v.L1_received_rows, v.L1_offsets, v.L1_experts_gated_swiglu_0, v.d_L1_expert_rows,
        v.L1_experts_d_grouped_linear_0
    )
    shared_T256_D192_bd4458.W(
        g.layers_1_ffn_shared_up, g.layers_1_ffn_shared_down, v.L1_x, v.L1_shared_swiglu_0, v.d_L1_shared,
        v.L1_shared_d_linear_0
    )
    del v.L1_shared_swiglu_0, v.d_L1_shared, v.L1_shared_d_linear_0
    router_T256_D192_4377cb.W(
        g.layers_1_ffn_norm, g.layers_1_ffn_router_weight, v.L1_residual, v.L1_x, v.L1_router_rmsnorm_0_rstd,
        v.L1_router_d_linear_wide_0, v.L1_router_d_rmsnorm_0
    )
    del v.L1_residual, v.L1_x, v.L1_router_rmsnorm_0_rstd, v.L1_router_d_linear_wide_0, v.L1_router_d_rmsnorm_0
    attention_T256_D192_42a366.W(
        g.layers_1_attention_norm, g.layers_1_attention_q_down, g.layers_1_attention_q_norm, g.layers_1_attention_q_up,
        g.layers_1_attention_kv_down, g.layers_1_attention_kv_norm, g.layers_1_attention_kv_up,
        g.layers_1_attention_out, v.L0_h, v.L1_attention_rmsnorm_0, v.L1_attention_rmsnorm_0_rstd,
        v.L1_attention_linear_0, v.L1_attention_rmsnorm_1, v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_2,
        v.L1_attention_rmsnorm_2, v.L1_attention_rmsnorm_2_rstd, v.L1_attention_mla_attention_0, v.d_L1_attended,
        v.L1_attention_d_linear_1, v.L1_attention_d_linear_3, v.L1_attention_d_rmsnorm_2, v.L1_attention_d_linear_2,
        v.L1_attention_d_rmsnorm_1, v.L1_attention_d_linear_0, v.L1_attention_d_rmsnorm_0
    )
    del (
        v.L0_h, v.L1_attention_rmsnorm_0, v.L1_attention_rmsnorm_0_rstd, v.L1_attention_linear_0,
        v.L1_attention_rmsnorm_1, v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_2, v.L1_attention_rmsnorm_2,
        v.L1_attention_rmsnorm_2_rstd, v.L1_attention_mla_attention_0, v.d_L1_attended, v.L1_attention_d_linear_1,
        v.L1_attention_d_linear_3, v.L1_attention_d_rmsnorm_2, v.L1_attention_d_linear_2, v.L1_attention_d_rmsnorm_1,
        v.L1_attention_d_linear_0, v.L1_attention_d_rmsnorm_0
    )
    dense_T256_D192_2fae2c.W(
        g.layers_0_ffn_norm, g.layers_0_ffn_up, g.layers_0_ffn_down, v.L0_dense_add_0, v.L0_dense_rmsnorm_0,
        v.L0_dense_rmsnorm_0_rstd, v.L0_dense_swiglu_0, v.d_L0_h, v.L0_dense_d_linear_0, v.L0_dense_d_rmsnorm_0
    )
    del (
        v.L0_dense_add_0, v.L0_dense_rmsnorm_0, v.L0_dense_rmsnorm_0_rstd, v.L0_dense_swiglu_0, v.d_L0_h,
        v.L0_dense_d_linear_0, v.L0_dense_d_rmsnorm_0
    )
    attention_T256_D192_42a366.W(
        g.layers_0_attention_norm, g.layers_0_attention_q_down, g.layers_0_attention_q_norm, g.layers_0_attention_q_up,
        g.layers_0_attention_kv_down, g.layers_0_attention_kv_norm, g.layers_0_attention_kv_up,
        g.layers_0_attention_out, v.embed_h, v.L0_attention_rmsnorm_0, v.L0_attention_rmsnorm_0_rstd,
        v.L0_attention_linear_0, v.L0_attention_rmsnorm_1, v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_2,
        v.L0_attention_rmsnorm_2, v.L0_attention_rmsnorm_2_rstd, v.L0_attention_mla_attention_0, v.d_L0_attended,
        v.L0_attention_d_linear_1, v.L0_attention_d_linear_3, v.L0_attention_d_rmsnorm_2, v.L0_attention_d_linear_2,
        v.L0_attention_d_rmsnorm_1, v.L0_attention_d_linear_0, v.L0_attention_d_rmsnorm_0
    )
    del (
        v.embed_h, v.L0_attention_rmsnorm_0, v.L0_attention_rmsnorm_0_rstd, v.L0_attention_linear_0,
        v.L0_attention_rmsnorm_1, v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_2, v.L0_attention_rmsnorm_2,
        v.L0_attention_rmsnorm_2_rstd, v.L0_attention_mla_attention_0, v.d_L0_attended, v.L0_attention_d_linear_1,
        v.L0_attention_d_linear_3, v.L0_attention_d_rmsnorm_2, v.L0_attention_d_linear_2, v.L0_attention_d_rmsnorm_1,
        v.L0_attention_d_linear_0, v.L0_attention_d_rmsnorm_0
    )
    embed_T256_552fd3.W(g.embedding, v.tokens, v.d_embed_h)
    del v.tokens, v.d_embed_h


BODIES = {
    'B1': B1,
    'E0': E0,
    'E1': E1,
    'F0': F0,
    'F1': F1,
    'F1_B0': F1_B0,
    'I0': I0,
    'W0': W0,
}
