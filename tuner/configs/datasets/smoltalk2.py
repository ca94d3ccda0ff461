"""SmolTalk 2, four parts of the mix behind SmolLM3: chat, eight languages, instructions, and thoughts; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(
        mixture=[
            dict(
                path="HuggingFaceTB/smoltalk2",
                name="SFT",
                split="smoltalk_smollm3_smol_magpie_ultra_no_think",
                format="messages",
            ),
            dict(
                path="HuggingFaceTB/smoltalk2",
                name="SFT",
                split="smoltalk_multilingual_8languages_lang_5_no_think",
                format="messages",
            ),
            dict(
                path="HuggingFaceTB/smoltalk2",
                name="SFT",
                split="tulu_3_sft_personas_instruction_following_no_think",
                format="messages",
            ),
            dict(path="HuggingFaceTB/smoltalk2", name="SFT", split="multi_turn_reasoning_if_think", format="messages"),
        ]
    )
)
