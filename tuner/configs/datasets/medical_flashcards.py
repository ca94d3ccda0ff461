"""Medical flashcards: 33,955 questions and answers."""

train_dataloader = dict(
    dataset=dict(
        path="medalpaca/medical_meadow_medical_flashcards",
        format="alpaca",
        columns=dict(instruction="input", output="output"),
    )
)
