"""Bodies of pipeline rank 0, constructed by dsc: what each action does, in order.

c: the executor · p: parameters · g: gradient accumulators · v, w: values of one stage and micro-batch
"""

from ..segments import attention_T16_D16_a7a29d
from ..segments import dense_T16_D16_2fa1db
from ..segments import embed_T16_f92b6f
from ..segments import experts_D16_E4_04c290
from ..segments import final_norm_T16_D16_2ffd44
from ..segments import final_norm_T16_D16_aa8b7e
from ..segments import head_T16_D16_f0e8b3
from ..segments import join_T16_D16_603b4f
from ..segments import mtp_input_T16_D16_9ba442
from ..segments import router_T16_D16_1acfb6
from ..segments import router_T16_D16_d7e466
from ..segments import shared_T16_D16_58ac42


def B0(c, p, g, a):
    v = c.values(0, a)
    v.d_mtp_loss = c.constant('mtp')
    v.d_M0_final_h, v.M0_head_d_linear_0 = head_T16_D16_f0e8b3.I(
        p.head, v.mtp_targets, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse, v.d_mtp_loss
    )
    del v.mtp_targets, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse, v.d_mtp_loss
    head_T16_D16_f0e8b3.W(g.head, v.M0_final_h, v.M0_head_d_linear_0)
    del v.M0_final_h, v.M0_head_d_linear_0
    v.d_M0_h = final_norm_T16_D16_aa8b7e.I(p.mtp_0_final_norm, v.M0_h, v.M0_final_norm_rmsnorm_0_rstd, v.d_M0_final_h)
    final_norm_T16_D16_aa8b7e.W(g.mtp_0_final_norm, v.M0_h, v.M0_final_norm_rmsnorm_0_rstd, v.d_M0_final_h)
    del v.M0_h, v.M0_final_norm_rmsnorm_0_rstd, v.d_M0_final_h
    v.d_M0_residual, v.d_M0_shared, v.d_M0_returned_rows = join_T16_D16_603b4f.I(v.M0_order, v.d_M0_h)
    del v.d_M0_h
    c.combine('I0', a, 'M0', v.d_M0_returned_rows, v.M0_route)
    v.d_M0_expert_rows = c.wait_combine('I0', a, 'M0')
    del v.d_M0_returned_rows
    v.d_M0_received_rows, v.d_M0_received_gate, v.M0_experts_d_grouped_linear_0 = experts_D16_E4_04c290.I(
        p.mtp_0_ffn_experts_up, p.mtp_0_ffn_experts_down, v.M0_received_gate, v.M0_offsets,
        v.M0_experts_grouped_linear_0, v.d_M0_expert_rows
    )
    del v.M0_received_gate, v.M0_experts_grouped_linear_0
    c.dispatch('I0', a, 'M0', v.d_M0_received_rows, v.d_M0_received_gate, v.M0_route)
    experts_D16_E4_04c290.W(
        g.mtp_0_ffn_experts_up, g.mtp_0_ffn_experts_down, v.M0_received_rows, v.M0_offsets, v.M0_experts_gated_swiglu_0,
        v.d_M0_expert_rows, v.M0_experts_d_grouped_linear_0
    )
    del (
        v.M0_received_rows, v.M0_offsets, v.M0_experts_gated_swiglu_0, v.d_M0_expert_rows,
        v.M0_experts_d_grouped_linear_0
    )
    v.d_M0_x, v.M0_shared_d_linear_0 = shared_T16_D16_58ac42.I(
        p.mtp_0_ffn_shared_up, p.mtp_0_ffn_shared_down, v.M0_shared_linear_0, v.d_M0_shared
    )
    del v.M0_shared_linear_0
    shared_T16_D16_58ac42.W(
        g.mtp_0_ffn_shared_up, g.mtp_0_ffn_shared_down, v.M0_x, v.M0_shared_swiglu_0, v.d_M0_shared,
        v.M0_shared_d_linear_0
    )
    del v.M0_shared_swiglu_0, v.d_M0_shared, v.M0_shared_d_linear_0
    v.d_M0_rows, v.d_M0_gate = c.wait_dispatch('I0', a, 'M0')
    del v.d_M0_received_rows, v.d_M0_received_gate, v.M0_route
    v.d_M0_entered, v.d_M0_attended, v.M0_router_d_linear_wide_0, v.M0_router_d_rmsnorm_0 = router_T16_D16_d7e466.I(
        p.mtp_0_ffn_norm, p.mtp_0_ffn_router_weight, v.M0_residual, v.M0_order, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_linear_wide_0, v.M0_router_route_0_expert, v.d_M0_residual, v.d_M0_x, v.d_M0_rows, v.d_M0_gate
    )
    del (
        v.M0_order, v.M0_router_linear_wide_0, v.M0_router_route_0_expert, v.d_M0_residual, v.d_M0_x, v.d_M0_rows,
        v.d_M0_gate
    )
    router_T16_D16_d7e466.W(
        g.mtp_0_ffn_norm, g.mtp_0_ffn_router_weight, v.M0_residual, v.M0_x, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_d_linear_wide_0, v.M0_router_d_rmsnorm_0
    )
    del v.M0_residual, v.M0_x, v.M0_router_rmsnorm_0_rstd, v.M0_router_d_linear_wide_0, v.M0_router_d_rmsnorm_0
    (
        v.d_M0_input, v.M0_attention_d_linear_1, v.M0_attention_d_linear_3, v.M0_attention_d_rmsnorm_2,
        v.M0_attention_d_linear_2, v.M0_attention_d_rmsnorm_1, v.M0_attention_d_linear_0, v.M0_attention_d_rmsnorm_0
    ) = attention_T16_D16_a7a29d.I(
        p.mtp_0_attention_norm, p.mtp_0_attention_q_down, p.mtp_0_attention_q_norm, p.mtp_0_attention_q_up,
        p.mtp_0_attention_kv_down, p.mtp_0_attention_kv_norm, p.mtp_0_attention_kv_up, p.mtp_0_attention_out,
        v.M0_input, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0, v.M0_attention_rmsnorm_1_rstd,
        v.M0_attention_linear_1, v.M0_attention_linear_2, v.M0_attention_rmsnorm_2_rstd, v.M0_attention_linear_3,
        v.M0_attention_mla_attention_0, v.M0_attention_mla_attention_0_lse, v.d_M0_entered, v.d_M0_attended
    )
    del v.M0_attention_linear_1, v.M0_attention_linear_3, v.M0_attention_mla_attention_0_lse, v.d_M0_entered
    attention_T16_D16_a7a29d.W(
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
    v.d_final_h_mtp, v.M0_input_d_cat2_0, v.M0_input_d_embedding_0 = mtp_input_T16_D16_9ba442.I(
        p.mtp_0_embedding_norm, p.mtp_0_hidden_norm, p.mtp_0_projection, v.final_h_mtp, v.M0_input_embedding_0,
        v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.d_M0_input
    )
    mtp_input_T16_D16_9ba442.W(
        g.embedding, g.mtp_0_embedding_norm, g.mtp_0_hidden_norm, g.mtp_0_projection, v.mtp_tokens, v.final_h_mtp,
        v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.M0_input_cat2_0, v.d_M0_input,
        v.M0_input_d_cat2_0, v.M0_input_d_embedding_0
    )
    del (
        v.mtp_tokens, v.final_h_mtp, v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd,
        v.M0_input_cat2_0, v.d_M0_input, v.M0_input_d_cat2_0, v.M0_input_d_embedding_0
    )
    v.d_loss = c.constant('loss')
    v.d_final_h, v.head_d_linear_0 = head_T16_D16_f0e8b3.I(
        p.head, v.targets, v.head_linear_0, v.head_cross_entropy_0_lse, v.d_loss
    )
    del v.targets, v.head_linear_0, v.head_cross_entropy_0_lse, v.d_loss
    head_T16_D16_f0e8b3.W(g.head, v.final_h, v.head_d_linear_0)
    del v.final_h, v.head_d_linear_0
    v.d_L1_h, v.final_norm_d_rmsnorm_0 = final_norm_T16_D16_2ffd44.I(
        p.final_norm, v.L1_h, v.final_norm_rmsnorm_0_rstd, v.d_final_h, v.d_final_h_mtp
    )
    del v.d_final_h, v.d_final_h_mtp
    final_norm_T16_D16_2ffd44.W(g.final_norm, v.L1_h, v.final_norm_rmsnorm_0_rstd, v.final_norm_d_rmsnorm_0)
    del v.L1_h, v.final_norm_rmsnorm_0_rstd, v.final_norm_d_rmsnorm_0
    v.d_L1_residual, v.d_L1_shared, v.d_L1_returned_rows = join_T16_D16_603b4f.I(v.L1_order, v.d_L1_h)
    del v.d_L1_h
    c.combine('I0', a, 'L1', v.d_L1_returned_rows, v.L1_route)
    v.d_L1_expert_rows = c.wait_combine('I0', a, 'L1')
    del v.d_L1_returned_rows
    v.d_L1_received_rows, v.d_L1_received_gate, v.L1_experts_d_grouped_linear_0 = experts_D16_E4_04c290.I(
        p.layers_1_ffn_experts_up, p.layers_1_ffn_experts_down, v.L1_received_gate, v.L1_offsets,
        v.L1_experts_grouped_linear_0, v.d_L1_expert_rows
    )
    del v.L1_received_gate, v.L1_experts_grouped_linear_0
    c.dispatch('I0', a, 'L1', v.d_L1_received_rows, v.d_L1_received_gate, v.L1_route)
    experts_D16_E4_04c290.W(
        g.layers_1_ffn_experts_up, g.layers_1_ffn_experts_down, v.L1_received_rows, v.L1_offsets,
        v.L1_experts_gated_swiglu_0, v.d_L1_expert_rows, v.L1_experts_d_grouped_linear_0
    )
    del (
        v.L1_received_rows, v.L1_offsets, v.L1_experts_gated_swiglu_0, v.d_L1_expert_rows,
        v.L1_experts_d_grouped_linear_0
    )
    v.d_L1_x, v.L1_shared_d_linear_0 = shared_T16_D16_58ac42.I(
        p.layers_1_ffn_shared_up, p.layers_1_ffn_shared_down, v.L1_shared_linear_0, v.d_L1_shared
    )
    del v.L1_shared_linear_0
    shared_T16_D16_58ac42.W(
        g.layers_1_ffn_shared_up, g.layers_1_ffn_shared_down, v.L1_x, v.L1_shared_swiglu_0, v.d_L1_shared,
        v.L1_shared_d_linear_0
    )
    del v.L1_shared_swiglu_0, v.d_L1_shared, v.L1_shared_d_linear_0
    v.d_L1_sequence_loss = c.constant('sequence_loss L1')
    v.d_L1_rows, v.d_L1_gate = c.wait_dispatch('I0', a, 'L1')
    del v.d_L1_received_rows, v.d_L1_received_gate, v.L1_route
    v.d_L1_entered, v.d_L1_attended, v.L1_router_d_linear_wide_0, v.L1_router_d_rmsnorm_0 = router_T16_D16_1acfb6.I(
        p.layers_1_ffn_norm, p.layers_1_ffn_router_weight, v.L1_residual, v.L1_order, v.L1_router_rmsnorm_0_rstd,
        v.L1_router_linear_wide_0, v.L1_router_route_0_expert, v.d_L1_residual, v.d_L1_x, v.d_L1_rows, v.d_L1_gate,
        v.d_L1_sequence_loss
    )
    del (
        v.L1_order, v.L1_router_linear_wide_0, v.L1_router_route_0_expert, v.d_L1_residual, v.d_L1_x, v.d_L1_rows,
        v.d_L1_gate, v.d_L1_sequence_loss
    )
    router_T16_D16_1acfb6.W(
        g.layers_1_ffn_norm, g.layers_1_ffn_router_weight, v.L1_residual, v.L1_x, v.L1_router_rmsnorm_0_rstd,
        v.L1_router_d_linear_wide_0, v.L1_router_d_rmsnorm_0
    )
    del v.L1_residual, v.L1_x, v.L1_router_rmsnorm_0_rstd, v.L1_router_d_linear_wide_0, v.L1_router_d_rmsnorm_0
    (
        v.d_L0_h, v.L1_attention_d_linear_1, v.L1_attention_d_linear_3, v.L1_attention_d_rmsnorm_2,
        v.L1_attention_d_linear_2, v.L1_attention_d_rmsnorm_1, v.L1_attention_d_linear_0, v.L1_attention_d_rmsnorm_0
    ) = attention_T16_D16_a7a29d.I(
        p.layers_1_attention_norm, p.layers_1_attention_q_down, p.layers_1_attention_q_norm, p.layers_1_attention_q_up,
        p.layers_1_attention_kv_down, p.layers_1_attention_kv_norm, p.layers_1_attention_kv_up,
        p.layers_1_attention_out, v.L0_h, v.L1_attention_rmsnorm_0_rstd, v.L1_attention_linear_0,
        v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_1, v.L1_attention_linear_2, v.L1_attention_rmsnorm_2_rstd,
        v.L1_attention_linear_3, v.L1_attention_mla_attention_0, v.L1_attention_mla_attention_0_lse, v.d_L1_entered,
        v.d_L1_attended
    )
    del v.L1_attention_linear_1, v.L1_attention_linear_3, v.L1_attention_mla_attention_0_lse, v.d_L1_entered
    attention_T16_D16_a7a29d.W(
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
    v.d_L0_entered, v.d_L0_attended, v.L0_dense_d_linear_0, v.L0_dense_d_rmsnorm_0 = dense_T16_D16_2fa1db.I(
        p.layers_0_ffn_norm, p.layers_0_ffn_up, p.layers_0_ffn_down, v.L0_dense_add_0, v.L0_dense_rmsnorm_0_rstd,
        v.L0_dense_linear_0, v.d_L0_h
    )
    del v.L0_dense_linear_0
    dense_T16_D16_2fa1db.W(
        g.layers_0_ffn_norm, g.layers_0_ffn_up, g.layers_0_ffn_down, v.L0_dense_add_0, v.L0_dense_rmsnorm_0,
        v.L0_dense_rmsnorm_0_rstd, v.L0_dense_swiglu_0, v.d_L0_h, v.L0_dense_d_linear_0, v.L0_dense_d_rmsnorm_0
    )
    del (
        v.L0_dense_add_0, v.L0_dense_rmsnorm_0, v.L0_dense_rmsnorm_0_rstd, v.L0_dense_swiglu_0, v.d_L0_h,
        v.L0_dense_d_linear_0, v.L0_dense_d_rmsnorm_0
    )
    (
        v.d_embed_h, v.L0_attention_d_linear_1, v.L0_attention_d_linear_3, v.L0_attention_d_rmsnorm_2,
        v.L0_attention_d_linear_2, v.L0_attention_d_rmsnorm_1, v.L0_attention_d_linear_0, v.L0_attention_d_rmsnorm_0
    ) = attention_T16_D16_a7a29d.I(
        p.layers_0_attention_norm, p.layers_0_attention_q_down, p.layers_0_attention_q_norm, p.layers_0_attention_q_up,
        p.layers_0_attention_kv_down, p.layers_0_attention_kv_norm, p.layers_0_attention_kv_up,
        p.layers_0_attention_out, v.embed_h, v.L0_attention_rmsnorm_0_rstd, v.L0_attention_linear_0,
        v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_1, v.L0_attention_linear_2, v.L0_attention_rmsnorm_2_rstd,
        v.L0_attention_linear_3, v.L0_attention_mla_attention_0, v.L0_attention_mla_attention_0_lse, v.d_L0_entered,
        v.d_L0_attended
    )
    del v.L0_attention_linear_1, v.L0_attention_linear_3, v.L0_attention_mla_attention_0_lse, v.d_L0_entered
    attention_T16_D16_a7a29d.W(
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
    embed_T16_f92b6f.W(g.embedding, v.tokens, v.d_embed_h)
    del v.tokens, v.d_embed_h


def F0(c, p, g, a):
    v = c.values(0, a)
    v.tokens = c.load('tokens', a)
    v.embed_h = embed_T16_f92b6f.F(p.embedding, v.tokens)
    (
        v.L0_entered, v.L0_attended, v.L0_attention_rmsnorm_0, v.L0_attention_rmsnorm_0_rstd, v.L0_attention_linear_0,
        v.L0_attention_rmsnorm_1, v.L0_attention_rmsnorm_1_rstd, v.L0_attention_linear_1, v.L0_attention_linear_2,
        v.L0_attention_rmsnorm_2, v.L0_attention_rmsnorm_2_rstd, v.L0_attention_linear_3,
        v.L0_attention_mla_attention_0, v.L0_attention_mla_attention_0_lse
    ) = attention_T16_D16_a7a29d.F(
        p.layers_0_attention_norm, p.layers_0_attention_q_down, p.layers_0_attention_q_norm, p.layers_0_attention_q_up,
        p.layers_0_attention_kv_down, p.layers_0_attention_kv_norm, p.layers_0_attention_kv_up,
        p.layers_0_attention_out, v.embed_h
    )
    (
        v.L0_h, v.L0_dense_add_0, v.L0_dense_rmsnorm_0, v.L0_dense_rmsnorm_0_rstd, v.L0_dense_linear_0,
        v.L0_dense_swiglu_0
    ) = dense_T16_D16_2fa1db.F(
        p.layers_0_ffn_norm, p.layers_0_ffn_up, p.layers_0_ffn_down, v.L0_entered, v.L0_attended
    )
    del v.L0_entered, v.L0_attended
    (
        v.L1_entered, v.L1_attended, v.L1_attention_rmsnorm_0, v.L1_attention_rmsnorm_0_rstd, v.L1_attention_linear_0,
        v.L1_attention_rmsnorm_1, v.L1_attention_rmsnorm_1_rstd, v.L1_attention_linear_1, v.L1_attention_linear_2,
        v.L1_attention_rmsnorm_2, v.L1_attention_rmsnorm_2_rstd, v.L1_attention_linear_3,
        v.L1_attention_mla_attention_0, v.L1_attention_mla_attention_0_lse
    ) = attention_T16_D16_a7a29d.F(
        p.layers_1_attention_norm, p.layers_1_attention_q_down, p.layers_1_attention_q_norm, p.layers_1_attention_q_up,
        p.layers_1_attention_kv_down, p.layers_1_attention_kv_norm, p.layers_1_attention_kv_up,
        p.layers_1_attention_out, v.L0_h
    )
    (
        v.L1_residual, v.L1_x, v.L1_rows, v.L1_gate, v.L1_order, v.L1_counts, v.L1_sequence_loss,
        v.L1_router_rmsnorm_0_rstd, v.L1_router_linear_wide_0, v.L1_router_route_0_expert
    ) = router_T16_D16_1acfb6.F(
        p.layers_1_ffn_norm, p.layers_1_ffn_router_weight, p.layers_1_ffn_router_bias, v.L1_entered, v.L1_attended
    )
    del v.L1_entered, v.L1_attended
    c.record('load layers.1', v.L1_counts)
    c.record('sequence_loss L1', v.L1_sequence_loss)
    del v.L1_sequence_loss
    c.counts('F0', a, 'L1', v.L1_counts)
    v.L1_shared, v.L1_shared_linear_0, v.L1_shared_swiglu_0 = shared_T16_D16_58ac42.F(
        p.layers_1_ffn_shared_up, p.layers_1_ffn_shared_down, v.L1_x
    )
    v.L1_route, v.L1_offsets = c.wait_counts('F0', a, 'L1')
    del v.L1_counts
    c.dispatch('F0', a, 'L1', v.L1_rows, v.L1_gate, v.L1_route)
    v.L1_received_rows, v.L1_received_gate = c.wait_dispatch('F0', a, 'L1')
    del v.L1_rows, v.L1_gate
    v.L1_expert_rows, v.L1_experts_grouped_linear_0, v.L1_experts_gated_swiglu_0 = experts_D16_E4_04c290.F(
        p.layers_1_ffn_experts_up, p.layers_1_ffn_experts_down, v.L1_received_rows, v.L1_received_gate, v.L1_offsets
    )
    c.combine('F0', a, 'L1', v.L1_expert_rows, v.L1_route)
    v.L1_returned_rows = c.wait_combine('F0', a, 'L1')
    del v.L1_expert_rows
    v.L1_h = join_T16_D16_603b4f.F(v.L1_residual, v.L1_shared, v.L1_returned_rows, v.L1_order)
    del v.L1_shared, v.L1_returned_rows
    v.final_h, v.final_h_mtp, v.final_norm_rmsnorm_0_rstd = final_norm_T16_D16_2ffd44.F(p.final_norm, v.L1_h)
    v.targets = c.load('targets', a)
    v.loss, v.head_linear_0, v.head_cross_entropy_0_lse = head_T16_D16_f0e8b3.F(p.head, v.final_h, v.targets)
    c.record('loss', v.loss)
    del v.loss
    v.mtp_tokens = c.load('mtp_tokens', a)
    (
        v.M0_input, v.M0_input_embedding_0, v.M0_input_rmsnorm_0_rstd, v.M0_input_rmsnorm_1_rstd, v.M0_input_cat2_0
    ) = mtp_input_T16_D16_9ba442.F(
        p.embedding, p.mtp_0_embedding_norm, p.mtp_0_hidden_norm, p.mtp_0_projection, v.mtp_tokens, v.final_h_mtp
    )
    (
        v.M0_entered, v.M0_attended, v.M0_attention_rmsnorm_0, v.M0_attention_rmsnorm_0_rstd, v.M0_attention_linear_0,
        v.M0_attention_rmsnorm_1, v.M0_attention_rmsnorm_1_rstd, v.M0_attention_linear_1, v.M0_attention_linear_2,
        v.M0_attention_rmsnorm_2, v.M0_attention_rmsnorm_2_rstd, v.M0_attention_linear_3,
        v.M0_attention_mla_attention_0, v.M0_attention_mla_attention_0_lse
    ) = attention_T16_D16_a7a29d.F(
        p.mtp_0_attention_norm, p.mtp_0_attention_q_down, p.mtp_0_attention_q_norm, p.mtp_0_attention_q_up,
        p.mtp_0_attention_kv_down, p.mtp_0_attention_kv_norm, p.mtp_0_attention_kv_up, p.mtp_0_attention_out, v.M0_input
    )
    (
        v.M0_residual, v.M0_x, v.M0_rows, v.M0_gate, v.M0_order, v.M0_counts, v.M0_router_rmsnorm_0_rstd,
        v.M0_router_linear_wide_0, v.M0_router_route_0_expert
    ) = router_T16_D16_d7e466.F(
        p.mtp_0_ffn_norm, p.mtp_0_ffn_router_weight, p.mtp_0_ffn_router_bias, v.M0_entered, v.M0_attended
    )
    del v.M0_entered, v.M0_attended
    c.record('load mtp.0', v.M0_counts)
    c.counts('F0', a, 'M0', v.M0_counts)
    v.M0_shared, v.M0_shared_linear_0, v.M0_shared_swiglu_0 = shared_T16_D16_58ac42.F(
        p.mtp_0_ffn_shared_up, p.mtp_0_ffn_shared_down, v.M0_x
    )
    v.M0_route, v.M0_offsets = c.wait_counts('F0', a, 'M0')
    del v.M0_counts
    c.dispatch('F0', a, 'M0', v.M0_rows, v.M0_gate, v.M0_route)
    v.M0_received_rows, v.M0_received_gate = c.wait_dispatch('F0', a, 'M0')
    del v.M0_rows, v.M0_gate
    v.M0_expert_rows, v.M0_experts_grouped_linear_0, v.M0_experts_gated_swiglu_0 = experts_D16_E4_04c290.F(
        p.mtp_0_ffn_experts_up, p.mtp_0_ffn_experts_down, v.M0_received_rows, v.M0_received_gate, v.M0_offsets
    )
    c.combine('F0', a, 'M0', v.M0_expert_rows, v.M0_route)
    v.M0_returned_rows = c.wait_combine('F0', a, 'M0')
    del v.M0_expert_rows
    v.M0_h = join_T16_D16_603b4f.F(v.M0_residual, v.M0_shared, v.M0_returned_rows, v.M0_order)
    del v.M0_shared, v.M0_returned_rows
    v.M0_final_h, v.M0_final_norm_rmsnorm_0_rstd = final_norm_T16_D16_aa8b7e.F(p.mtp_0_final_norm, v.M0_h)
    v.mtp_targets = c.load('mtp_targets', a)
    v.mtp_loss, v.M0_head_linear_0, v.M0_head_cross_entropy_0_lse = head_T16_D16_f0e8b3.F(
        p.head, v.M0_final_h, v.mtp_targets
    )
    c.record('mtp_loss', v.mtp_loss)
    del v.mtp_loss


BODIES = {
    'B0': B0,
    'F0': F0,
}
