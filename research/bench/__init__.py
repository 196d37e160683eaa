"""Programs that measure diffquant beside its peers and on rented GPUs; the verb `bench` needs none of them."""
