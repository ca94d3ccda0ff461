"""XTuner v0.1's own defaults, where they differ from base.py: what its recipe names mean, and nothing else."""

train_dataloader = dict(dataset=dict(pack_length=None))
# XTuner takes 16 rows on each rank, one by one, and recomputes always. base.py's 'auto' takes the same 16 rows, in
# larger micro-batches and without recomputation where memory allows: the same result, up to a quarter faster.
train_cfg = dict(global_batch_size=None)
# Laid over a method with adapters alone.
adapter = dict(r=64, lora_alpha=16, lora_dropout=0.1)
