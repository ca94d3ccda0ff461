"""From a data set's path to packed, labelled token rows; knows nothing of models, trainers or DeepSpeed."""
