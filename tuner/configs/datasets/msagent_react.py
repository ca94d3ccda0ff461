"""MSAgent-Bench: an assistant calls tools; expects ./data/msagent_bench.jsonl from ModelScope."""

# damo/MSAgent-Bench on modelscope.cn. Tool calls keep the data's own marks; XTuner rewrote them as ReAct.
train_dataloader = dict(dataset=dict(path="./data/msagent_bench.jsonl", format="msagent", packing=False))
