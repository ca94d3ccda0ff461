"""Stanford Alpaca: 52,002 instructions with answers by text-davinci-003."""

train_dataloader = dict(dataset=dict(path="tatsu-lab/alpaca", format="alpaca"))
