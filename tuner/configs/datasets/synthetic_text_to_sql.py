"""Gretel's text to SQL: 100,000 schemas, questions and queries; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(
        path="gretelai/synthetic_text_to_sql",
        format="alpaca",
        columns=dict(instruction="{sql_context}\n\n{sql_prompt}", output="sql"),
    )
)
