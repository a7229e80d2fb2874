"""From chosen tensors to files: what a target format says, how bytes move into files, and the journal that lets a conversion resume."""
