"""Alpaca's instructions in Chinese, answered by GPT-4; about 52,000 rows."""

train_dataloader = dict(
    dataset=dict(
        path="silk-road/alpaca-data-gpt4-chinese",
        format="alpaca",
        columns=dict(instruction="instruction_zh", input="input_zh", output="output_zh"),
    )
)
