"""AgentInstruct: 1,866 ways through six kinds of tasks."""

train_dataloader = dict(
    dataset=dict(
        mixture=[
            dict(path="THUDM/AgentInstruct", split="os", format="sharegpt"),
            dict(path="THUDM/AgentInstruct", split="db", format="sharegpt"),
            dict(path="THUDM/AgentInstruct", split="alfworld", format="sharegpt"),
            dict(path="THUDM/AgentInstruct", split="webshop", format="sharegpt"),
            dict(path="THUDM/AgentInstruct", split="kg", format="sharegpt"),
            dict(path="THUDM/AgentInstruct", split="mind2web", format="sharegpt"),
        ]
    )
)
