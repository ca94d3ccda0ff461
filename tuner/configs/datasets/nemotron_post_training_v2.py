"""Nemotron Post-Training v2, its four English parts: math, code, STEM and chat; gated; CC BY 4.0."""

train_dataloader = dict(
    dataset=dict(
        mixture=[
            dict(path="nvidia/Nemotron-Post-Training-Dataset-v2", split="math", format="messages"),
            dict(path="nvidia/Nemotron-Post-Training-Dataset-v2", split="code", format="messages"),
            dict(path="nvidia/Nemotron-Post-Training-Dataset-v2", split="stem", format="messages"),
            dict(path="nvidia/Nemotron-Post-Training-Dataset-v2", split="chat", format="messages"),
        ]
    )
)
