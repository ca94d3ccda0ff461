"""From a data set's path to the batches of a trainer; knows nothing of models or DeepSpeed. The way of a row:

    sources     a path, hub id or object -> files, or the rows of the hub
    readers     a file                   -> rows with their line
    mixing      rows of several sources  -> one order, by weight; less those that are held out (`holdout`)
    formats     a row                    -> a sample: a conversation, a text, a pair, feedback (`sample`)
    pipeline    all of the above; the caller's `on_error` decides what a wrong row means
    encoding    samples                  -> tokens, and which of them carry loss (`templates`, `rendering`, `masks`)
    layouts     samples                  -> the rows of an objective, cut to length
    packing     those                    -> rows of a fixed length
    prepare     all of the above, counted (`outcomes`) and kept in a cache: `prepared`
    blocks      all of the above         -> parts of a data set of any size, made while others are trained on
    stream      blocks                   -> rows by their number in the order of training
    batches     rows                     -> what a trainer computes on

`inspection` shows people the result; `processes` takes all cores; `fast_tokens` encodes many rows; `limits` bounds what
one row may become; `thinking` decides what happens to the reasoning before an answer; `step_count` says how many steps
so many rows are, and whether they are too few.
"""
