"""What other engines need to run the folders that diffquant writes, without diffquant."""
