"""Text to SQL: a schema, a question and the query; 78,577 rows; CC BY 4.0."""

# The system turn is ours, with the meaning of XTuner's.
train_dataloader = dict(
    dataset=dict(
        path="b-mc2/sql-create-context",
        format="alpaca",
        columns=dict(question="{context}\n{question}"),
        system="You know SQL. Answer the question with a query on the tables that CREATE TABLE describes.",
    )
)
