"""xLAM: 60,000 questions answered by calls of tools; gated; CC BY 4.0."""

# The calls are taught as JSON text, as they stand in the data.
train_dataloader = dict(
    dataset=dict(
        path="Salesforce/xlam-function-calling-60k", format="alpaca", columns=dict(query="query", response="answers")
    )
)
