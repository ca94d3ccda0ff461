"""Glaive's function calling, with tools and their results, in ShareGPT's shape."""

train_dataloader = dict(dataset=dict(path="hiyouga/glaive-function-calling-v2-sharegpt", format="sharegpt"))
