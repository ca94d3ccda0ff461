"""PubMedQA: 211,269 questions made of titles, answered by the abstracts' conclusions; MIT."""

train_dataloader = dict(
    dataset=dict(
        path="qiaojin/PubMedQA",
        name="pqa_artificial",
        format="alpaca",
        columns=dict(question="question", answer="long_answer"),
    )
)
