"""s1K-1.1: 1,000 hard questions with DeepSeek-R1's thoughts."""

train_dataloader = dict(
    dataset=dict(
        path="simplescaling/s1K-1.1",
        format="alpaca",
        columns=dict(
            instruction="question", output="<think>\n{deepseek_thinking_trajectory}\n</think>\n\n{deepseek_attempt}"
        ),
    )
)
