"""Answers of Zhihu, in Chinese, pairs by votes."""

train_dataloader = dict(dataset=dict(path="liyucheng/zhihu_rlhf_3k", format="preference"))
