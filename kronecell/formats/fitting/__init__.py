"""From a dense matrix to the factors of a network: closed-form starts (svd), refinement (als, descent), the driver."""
