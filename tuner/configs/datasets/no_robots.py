"""No Robots: 9,500 instructions and answers written by people; CC BY-NC 4.0."""

train_dataloader = dict(dataset=dict(path="HuggingFaceH4/no_robots", format="messages"))
