"""LLaMA-Factory's Chinese preference mix; 10,000 pairs."""

train_dataloader = dict(dataset=dict(path="llamafactory/DPO-En-Zh-20k", name="zh", format="preference"))
