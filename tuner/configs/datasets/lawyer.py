"""Chinese law, questions with answers, from LAW-GPT; expects its two files in ./data."""

# From github.com/LiuHC0428/LAW-GPT. The system turn is ours, with the meaning of XTuner's.
train_dataloader = dict(
    dataset=dict(
        mixture=[
            dict(
                path="./data/CrimeKgAssitant清洗后_52k.json",
                format="alpaca",
                columns=dict(instruction="input", output="output"),
                system="你是一名中国律师。请准确回答用户的法律问题，并说明依据。",
            ),
            dict(
                path="./data/训练数据_带法律依据_92k.json",
                format="alpaca",
                system="你是一名中国律师。请准确回答用户的法律问题，并说明依据。",
            ),
        ]
    )
)
