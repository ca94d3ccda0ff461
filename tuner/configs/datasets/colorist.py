"""Descriptions of colours and their hex codes; 33,896 rows."""

# The system turn is ours, with the meaning of XTuner's, which also cut the colour's name from the description.
train_dataloader = dict(
    dataset=dict(
        path="burkelibbey/colors",
        format="alpaca",
        columns=dict(instruction="description", output="color"),
        system="You design with colours. Answer a description with the colour that it means.",
    )
)
