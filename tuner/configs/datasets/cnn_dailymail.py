"""CNN and Daily Mail: 287,113 articles and their highlights; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(
        path="abisee/cnn_dailymail",
        name="3.0.0",
        format="alpaca",
        columns=dict(instruction="article", output="highlights"),
        system="Summarize the article.",
    )
)
