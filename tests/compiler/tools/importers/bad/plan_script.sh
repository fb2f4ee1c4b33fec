# A script whose sizes are computed, with a size that is no number and a loss that a spec does not have.
LAYERS=$(python -c "print(61)")
torchrun pretrain_gpt.py --num-layers $COUNT --hidden-size wide --num-attention-heads 16 --ffn-hidden-size 512 \
    --seq-length 4096 --global-batch-size 64 --train-iters 100 --lr 1e-3 --num-experts 8 --moe-z-loss-coeff 1e-3
