"""XTuner v0.1's own defaults, where they differ from base.py: what its recipe names mean, and nothing else."""

train_dataloader = dict(batch_size=1, dataset=dict(pack_length=None))
optim_wrapper = dict(accumulative_counts=16)
# XTuner recomputes always; the result is the same without, where there is memory for it: a quarter faster.
train_cfg = dict(global_batch_size=None, gradient_checkpointing="auto")
# Laid over a method with adapters alone.
adapter = dict(r=64, lora_alpha=16, lora_dropout=0.1)
