"""Medical questions with thoughts, in Chinese; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(
        name="zh",
        path="FreedomIntelligence/medical-o1-reasoning-SFT",
        format="alpaca",
        columns=dict(instruction="Question", output="<think>\n{Complex_CoT}\n</think>\n\n{Response}"),
    )
)
