"""StarCoder2's own instructions, checked by running them; 50,661 rows; ODC-BY."""

train_dataloader = dict(
    dataset=dict(
        path="bigcode/self-oss-instruct-sc2-exec-filter-50k",
        format="alpaca",
        columns=dict(instruction="instruction", output="response"),
    )
)
