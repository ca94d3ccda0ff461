"""A paper's title from its abstract; expects ./data/arxiv_data.json, made of Kaggle's arXiv dump."""

# The system turn is ours, with the meaning of XTuner's. --data PATH drops format, columns and system:
# set train_dataloader.dataset.path instead where the file lies elsewhere.
train_dataloader = dict(
    dataset=dict(
        path="./data/arxiv_data.json",
        format="alpaca",
        columns=dict(instruction="abstract", output="title"),
        system="You know how papers are written. Give the paper with this abstract a good title.",
    )
)
