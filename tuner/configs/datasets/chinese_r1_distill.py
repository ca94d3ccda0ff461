"""DeepSeek-R1's answers in Chinese, with its thoughts; 110,000 rows."""

train_dataloader = dict(dataset=dict(path="Congliu/Chinese-DeepSeek-R1-Distill-data-110k-SFT", format="alpaca"))
