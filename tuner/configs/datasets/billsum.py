"""BillSum: 18,949 bills of the US Congress and their summaries; CC0."""

train_dataloader = dict(
    dataset=dict(
        path="FiscalNote/billsum",
        format="alpaca",
        columns=dict(instruction="text", output="summary"),
        system="Summarize the bill.",
    )
)
