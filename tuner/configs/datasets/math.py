"""MATH: 7,500 competition problems with solutions, seven subjects; MIT."""

train_dataloader = dict(
    dataset=dict(
        mixture=[
            dict(path="EleutherAI/hendrycks_math", name="algebra", format="alpaca"),
            dict(path="EleutherAI/hendrycks_math", name="counting_and_probability", format="alpaca"),
            dict(path="EleutherAI/hendrycks_math", name="geometry", format="alpaca"),
            dict(path="EleutherAI/hendrycks_math", name="intermediate_algebra", format="alpaca"),
            dict(path="EleutherAI/hendrycks_math", name="number_theory", format="alpaca"),
            dict(path="EleutherAI/hendrycks_math", name="prealgebra", format="alpaca"),
            dict(path="EleutherAI/hendrycks_math", name="precalculus", format="alpaca"),
        ]
    )
)
